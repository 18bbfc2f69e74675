"""Faults of the host tier and of the store below it; with those of `faults`, the whole list.

Owns: these faults, and which alerts each must set off. Must not know: Prometheus, or how long to wait.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import BackupPolicy, CopyBackend
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.tier.copies import TwinCopier
from tests.helpers.cluster import eventually
from tests.helpers.held_copies import hold, let_go, with_held_copies
from tests.helpers.live_rooms import http, live_cluster, status
from tests.integration.test_load_back import PAGE, Conversation, Setting, Tiers
from tests.operate.faults import FAULTS, Stage, fault

__all__ = ["FAULTS"]

SETTING = Setting(HostLayout.PAGE_FIRST, DeviceLayout.LAYER_FIRST, CopyBackend.KERNEL, BackupPolicy.WRITE_THROUGH)
TOKENS = 3 * PAGE


@contextmanager
def two_tiers(
    *,
    host_pages: int = 64,
    store: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    prefetch_s: float = 2.0,
    **more: Any,
) -> Iterator[Tiers]:
    """A pair with a host tier on both sides and, if `store` says one, a store below it."""
    tier: dict[str, Any] = {"enabled": True, "model_name": "tiny", "model_revision": "1", "prefetch_s": prefetch_s}
    tier |= {"store": store, "store_limits": {"remember_s": 0.0, "settle_s": 0.5, "put_s": 3.0} | (limits or {})}
    host = {"pages": host_pages, "layout": SETTING.host.value, "backend": SETTING.backend.value}
    waits = {"timeouts": {"copy_s": 1.0}}
    with live_cluster(
        prefill={"tier": tier | {"host": host | {"checkpoint_pages": 16}}} | waits,
        decode={"tier": tier | {"host": host}} | waits,
        pages={"full": 24, "swa": 12, "request": 6},
        host_pages=96,
        **more,
    ) as running:
        assert running.sender
        assert running.reader
        made = Tiers(running, SETTING)
        for daemon in made.both if store else ():
            eventually("its store is asked", lambda daemon=daemon: state_of(daemon) == "closed", 60.0)
        yield made


@contextmanager
def files(**more: Any) -> Iterator[tuple[dict[str, Any], Path]]:
    """A store of files for a stage, and its directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as name:
        directory = Path(name) / "store"
        yield {"kind": "files", "directory": str(directory), "max_bytes": 64 << 20} | more, directory


def state_of(daemon: Any) -> str:
    """Whether a daemon asks its store."""
    return str(status(daemon)["store"]["state"])


def daemons(tiers: Tiers) -> list[Any]:
    return tiers.live.cluster.all()


def crosses(tiers: Tiers, numbers: Iterator[int]) -> Conversation:
    """A conversation of its own, which has crossed."""
    talk = Conversation(tiers, next(numbers))
    talk.cross(TOKENS)
    return talk


def stored(tiers: Tiers) -> None:
    """Wait until the store has been offered all that is on the host."""
    tiers.on_host()
    for daemon in tiers.both:
        eventually("written", lambda daemon=daemon: not status(daemon)["store"]["waiting_prompts"])


def forget(tiers: Tiers) -> None:
    """Device and host forget everything; the store does not."""
    for daemon in tiers.both:
        http("DELETE", daemon, "/v1/prefixes")


@fault("BackupsFailing", besides="PagesQuarantined QuarantineLarge")
def a_rank_worker_does_not_copy() -> Iterator[Stage]:
    numbers = count(1)
    with two_tiers(change=with_held_copies) as tiers:

        def strike() -> None:
            hold(tiers.live.prefill)
            crosses(tiers, numbers)

        try:
            yield Stage(daemons(tiers), lambda: crosses(tiers, numbers), strike)
        finally:
            let_go(tiers.live.prefill)


@fault("LoadBacksFailing", besides="RoomsFailing RoomsTimeOut")
def the_engine_cannot_copy() -> Iterator[Stage]:
    numbers = count(1)
    with two_tiers() as tiers:
        talks: list[Conversation] = []

        def well() -> None:
            talks.append(crosses(tiers, numbers))
            tiers.on_host()
            tiers.forget()

        def strike() -> None:
            with mock.patch.object(TwinCopier, "copy", side_effect=TransportError("the device is out of memory")):
                talks[0].admit(TOKENS + PAGE)
                with suppress(BridgeError):
                    talks[0].begin()
            eventually("noticed", lambda: status(tiers.live.prefill)["host_tier"]["failed_loads"])

        yield Stage(daemons(tiers), well, strike)


@fault("HostTierUnused")
def no_prompt_comes_twice() -> Iterator[Stage]:
    numbers = count(1)
    with two_tiers(host_pages=12) as tiers:

        def again() -> None:
            crosses(tiers, numbers)

        yield Stage(daemons(tiers), again, lambda: None, again)


@fault("PrefixStoreAway", besides="StoreProcessDying PrefetchesLate PagesQuarantined")
def the_process_of_a_store_hangs_again_and_again() -> Iterator[Stage]:
    numbers = count(1)
    with files() as (store, _), two_tiers(store=store, prefetch_s=0.5, limits={"failures": 1}) as tiers:

        def halt() -> None:
            for daemon in tiers.both:
                if pid := status(daemon)["store"]["pid"]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
            crosses(tiers, numbers)

        yield Stage(daemons(tiers), lambda: crosses(tiers, numbers), halt, halt)


@fault("StoreProcessDying", besides="PrefixStoreAway")
def the_process_of_a_store_dies_again_and_again() -> Iterator[Stage]:
    numbers = count(1)
    with files() as (store, _), two_tiers(store=store) as tiers:

        def kill() -> None:
            if pid := status(tiers.live.decode)["store"]["pid"]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        yield Stage(daemons(tiers), lambda: crosses(tiers, numbers), kill, kill)


@fault("StorePoisoned")
def bytes_change_in_the_store() -> Iterator[Stage]:
    numbers = count(1)
    with files() as (store, directory), two_tiers(store=store) as tiers:

        def strike() -> None:
            talk = crosses(tiers, numbers)
            stored(tiers)
            forget(tiers)
            for path in directory.glob("??/*"):
                data = path.read_bytes()
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            talk.begun = None
            talk.cross(TOKENS + PAGE)

        yield Stage(daemons(tiers), lambda: crosses(tiers, numbers), strike)


@fault("PrefetchesLate")
def the_store_is_slower_than_prompts_are_long() -> Iterator[Stage]:
    numbers = count(1)
    with files() as (store, _), two_tiers(store=store, prefetch_s=0.001, limits={"failures": 1_000_000}) as tiers:
        talks: list[Conversation] = []

        def again() -> None:
            forget(tiers)
            talks[0].begun = None
            talks[0].cross(TOKENS)

        def well() -> None:
            talks.append(crosses(tiers, numbers))
            stored(tiers)

        yield Stage(daemons(tiers), well, lambda: None, again)


@fault("PrefixStoreNotWritten")
def the_store_has_no_room_for_anything() -> Iterator[Stage]:
    numbers = count(1)
    with files(max_bytes=1000) as (store, _), two_tiers(store=store) as tiers:

        def again() -> None:
            crosses(tiers, numbers)

        yield Stage(daemons(tiers), lambda: None, again, again)
