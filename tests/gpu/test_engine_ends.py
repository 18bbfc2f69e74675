"""An engine that is killed while its kernels write to a page: what is written after each of its ends, and when the page is free."""

import os
import select
import signal
import socket as unix
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbridge.core.ids import Role
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.gpu.test_cuda_daemons import all_free, on_devices
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.gpu_children import child, count_up, count_up_claimed, counter_of
from tests.helpers.live_rooms import nodes, write
from tests.helpers.rank_harness import Case

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
TOKENS = 300
ROUNDS = 3
SETTLE_S = 0.5
"""The default of timeouts.engine_settle_s."""
WATCH_S = 1.0


@contextmanager
def listening(path: Path) -> Iterator[unix.socket]:
    with unix.socket(unix.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def test_nothing_is_written_by_a_killed_engine_once_its_pages_are_free(device: int, tmp_path: Path) -> None:
    with (
        nodes(on_devices(device), on_devices(device)) as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as observer,
    ):
        for round_ in range(ROUNDS):
            with listening(tmp_path / f"witness-{round_}") as listener:
                kill_and_count(running.prefill, observer, listener, running.pair(TOKENS)["room"], device)


def test_nothing_is_written_by_a_killed_decode_engine_once_its_pages_are_free(device: int, tmp_path: Path) -> None:
    """It goes on writing pages of a room that it has claimed, as one does that appends rows to a page it had the number of."""
    with (
        nodes(on_devices(device), on_devices(device)) as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as sender,
        DecodeEngine.attach(running.decode.runtime_dir) as observer,
    ):
        for round_ in range(ROUNDS - 1):
            room = running.pair(TOKENS)["room"]
            write(sender, room, Case(TOKENS))
            with listening(tmp_path / f"witness-{round_}") as listener:
                kill_and_count(running.decode, observer, listener, room, device)
            sender.events()


def kill_and_count(daemon: DaemonProcess, observer: Engine, listener: unix.socket, room: int, device: int) -> None:
    """One round. Prints how many writes came after each end; the last figure must be 0."""
    views = next(iter(observer.views.values()))
    witness = listener.getsockname()
    counting = count_up if daemon.role == Role.PREFILL else count_up_claimed
    with child(counting, str(daemon.runtime_dir), room, TOKENS, witness, device) as engine:
        counter = counter_of(views, engine.hear())
        seen, _ = listener.accept()
        pid = engine.process.pid
        assert pid is not None
        ended = os.pidfd_open(pid)
        try:
            eventually("its kernels write", lambda: int(counter.item()) > 0)
            os.kill(pid, signal.SIGKILL)
            assert seen.recv(1) == b""
            connection_s, at_connection = time.monotonic(), int(counter.item())
            assert select.select([ended], [], [], 30.0)[0], "the process does not end"
            process_s, at_process = time.monotonic(), int(counter.item())
            assert not all_free(daemon, observer), "its pages were free before it had settled"
            eventually("its pages are free", lambda: all_free(daemon, observer))
            free_s, at_free = time.monotonic(), int(counter.item())
            assert free_s - process_s >= SETTLE_S / 2
            time.sleep(WATCH_S)
            after = int(counter.item())
        finally:
            os.close(ended)
            seen.close()
    print(
        f"writes: {at_connection} before the connection ended, {at_process - at_connection} until the process had "
        f"({process_s - connection_s:.3f} s), {at_free - at_process} until the pages were free ({free_s - process_s:.3f} s), "
        f"{after - at_free} in {WATCH_S:g} s from then on"
    )
    assert after == at_free, "a page was written to after it had been given back"
