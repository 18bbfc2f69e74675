"""A pair with two transports, whose connections by one are cut in the middle of a transfer, by real daemons and libraries.

Which transfer it is that notices is up to the machine, so rooms are sent until one has: every byte of each is compared.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.core.errors import ConflictError, RoomFailedError
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.contract.harness import BACKENDS, require_library
from tests.helpers.cluster import Cluster, cluster, eventually, mutated
from tests.helpers.cut_paths import CutSettings, cut_worker
from tests.helpers.live_rooms import all_free, check_rows, ends, fill, http, metric, status
from tests.helpers.matrices import kept

RANK = "pp0.tp0"
TOKENS = 20_000
ADDRESSES = {"mooncake": "127.0.0.2", "nixl": "127.0.0.1"}
ORDERS = [("mooncake", "nixl"), kept((("nixl", "mooncake"),), False)]
LOOK_S = 120.0
SOON_AGAIN = "\nfrom kvbridge.worker import peers\npeers.RETRY_S = 0.5\n"


@dataclass
class Stage:
    """Two daemons, an engine on each side, and the flag that cuts."""

    running: Cluster
    sender: PrefillEngine
    reader: DecodeEngine
    flag: Path
    tokens: int
    last: int = 0
    """The number of the last room."""

    def cross(self, *, compared: bool = True) -> float:
        """Send a room and compare its bytes; returns the seconds from the publication to the claim."""
        self.last = int(self.running.pair(self.tokens)["room"])
        begun = self.sender.begin(self.last, prompt_tokens=self.tokens)
        fill(self.sender, begun)
        begun_s = time.monotonic()
        begun.publish(self.tokens)
        begun.finish()
        claimed = self.reader.claim(self.last, timeout_s=LOOK_S)
        took_s = time.monotonic() - begun_s
        if compared:
            check_rows(self.reader, claimed)
        claimed.release()
        return took_s

    def crosses(self) -> bool:
        """The same; whether it has arrived."""
        try:
            self.cross()
        except (RoomFailedError, ConflictError):  # it may have failed before it was written
            return False
        return True

    def cross_until_lost(self) -> int:
        """Send rooms until a path was lost under one; returns that one."""
        self.flag.touch()
        ends_at_s = time.monotonic() + LOOK_S
        while time.monotonic() < ends_at_s:
            self.cross()
            if self.problems():
                return self.last
        raise AssertionError(f"no path was lost in {LOOK_S:g} s")

    def problems(self) -> list[dict[str, Any]]:
        return [problem for problem in status(self.running.prefill)["problems"] if problem["what"] == "path lost"]

    def paths(self) -> tuple[str, str]:
        """Return the paths by which prefill reaches decode, and those by which it could."""
        [peer] = status(self.running.prefill)["peers"]
        return "".join(peer["transports"][RANK]), "".join(peer["standby"].get(RANK, ()))

    def timeline(self, daemon: DaemonProcess, room: int) -> list[str]:
        shown = http("GET", daemon, f"/v1/requests/{room}/timeline").json()
        return [entry["what"] for entry in shown["entries"]]

    def all_given_back(self) -> None:
        for daemon in (self.running.prefill, self.running.decode):
            all_free(daemon)
            assert not status(daemon)["quarantine"]


@contextmanager
def stage(
    order: tuple[str, ...],
    folder: Path,
    *cut: str,
    model: str = "tiny-v4",
    tokens: int = TOKENS,
    after_share: float = 0.2,
) -> Iterator[Stage]:
    """A pair that has the transports of `order`; the first of `cut` says when, and all of them are cut then."""
    for name in order:
        require_library(BACKENDS[name])
    flag = folder / "flag"
    settings = CutSettings(
        transport=cut[0], addresses=tuple(ADDRESSES[name] for name in cut), after_share=after_share, flag=str(flag)
    )
    section = {
        "order": list(order),
        "mooncake": {"host": ADDRESSES["mooncake"]},
        "nixl": {"ucx_tls": "tcp", "ucx_net_devices": "lo", "batch_operations": 2, "window_operations": 4},
    }

    def change(daemon: DaemonProcess) -> DaemonProcess:
        code = cut_worker(settings) + SOON_AGAIN
        return mutated(daemon, worker_code=code) if daemon.role == "prefill" else daemon

    with ExitStack() as stack:
        running = stack.enter_context(
            cluster(
                {"preset": model},
                transport=order[0],
                prefill={"transports": section},
                decode={"transports": section},
                pages={"full": tokens // 256 + 48, "swa": 64, "request": 8},
                host_pages=tokens // 256 + 48,
                change=change,
            )
        )
        sender = stack.enter_context(PrefillEngine.attach(running.prefill.runtime_dir))
        reader = stack.enter_context(DecodeEngine.attach(running.decode.runtime_dir))
        made = Stage(running, sender, reader, flag, tokens)
        made.cross()
        eventually("both paths", lambda: made.paths() == order, LOOK_S)
        yield made


@pytest.mark.parametrize("order", ORDERS, ids="-then-".join)
def test_a_room_goes_on_over_the_next_transport_and_the_lost_one_comes_back(order: tuple[str, str], tmp_path: Path):
    first, _ = order
    with stage(order, tmp_path, first) as made:
        room = made.cross_until_lost()
        prefill, decode = made.running.prefill, made.running.decode
        assert made.problems()[0]["reason"].startswith(f"{first} of rank {RANK}: ")
        assert metric(prefill, "kvbridge_peer_failures_total", peer="decode-0/node-0", code="path_lost") >= 1
        assert "room rerouted" in made.timeline(prefill, room)
        shut = status(decode)["fence"]["epoch"] > 0  # unless every operation that was begun had been confirmed
        assert ("room rerouted" in made.timeline(decode, room)) is shut
        ends(prefill, room, "completed")
        made.flag.unlink()
        eventually("both paths again", lambda: made.paths() == order, LOOK_S)
        made.cross()
        made.all_given_back()


def test_with_both_paths_lost_the_room_fails_and_nobody_keeps_its_pages(tmp_path: Path) -> None:
    order = ("mooncake", "nixl")
    with stage(order, tmp_path, *order) as made:
        made.flag.touch()
        eventually("a room that fails", lambda: not made.crosses(), LOOK_S)
        room = made.last
        for daemon in (made.running.prefill, made.running.decode):
            ends(daemon, room, "failed", "transport_failed")
        made.flag.unlink()
        made.all_given_back()
        eventually("a room that crosses", made.crosses, LOOK_S)
        made.all_given_back()
