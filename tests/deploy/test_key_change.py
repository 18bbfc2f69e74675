"""CURVE keys of running nodes are changed in their files, with rooms under way: nothing is restarted, and no room is lost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.control.keys import CurveKeys, generate_keys
from tests.helpers.cluster import cluster, eventually
from tests.helpers.live_rooms import LiveCluster

TOKENS = 600
POOLS = {"device": {"full": 32, "swa": 16, "request": 8}}
TIMEOUTS = {"control_heartbeat_s": 3.0, "control_resend_s": 0.2}
"""A link that is made anew may take half a heartbeat before a peer is lost, also on a machine that is slow for a moment."""


@dataclass
class Keyed:
    """A cluster whose nodes accept who is in their lists."""

    live: LiveCluster
    folder: Path

    def list_keys(self, role: str, *keys: CurveKeys, bound: bool = True) -> None:
        """Say whom a node accepts."""
        other = {"prefill": "decode-0", "decode": "prefill-0"}[role]
        entries = [f"{each.public} {other}" if bound else each.public for each in keys]
        write(self.folder / f"{role}.allowed", *entries)

    def change(self, role: str, keys: CurveKeys) -> None:
        """Give a node another secret."""
        write(self.folder / f"{role}.key", keys.secret)

    def noticed(self, daemon: DaemonProcess, event: str, times: int) -> None:
        """Wait until a daemon has said something that often; rooms cross meanwhile, one after another."""

        def look() -> bool:
            self.live.cross(TOKENS, self.live.ticket(TOKENS)["room"])
            return daemon.log(5_000).count(f'"{event}"') >= times

        eventually(event, look)


def write(file: Path, *lines: str) -> None:
    draft = file.with_suffix(".new")
    draft.write_text("".join(f"{line}\n" for line in lines))
    draft.chmod(0o600)
    draft.rename(file)


@contextmanager
def keyed(*, bound: bool = True, first: tuple[CurveKeys, CurveKeys]) -> Iterator[Keyed]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    sections = {}
    for role, keys in zip(("prefill", "decode"), first, strict=True):
        write(folder / f"{role}.key", keys.secret)
        curve = {"secret_key_file": str(folder / f"{role}.key"), "allowed_keys_file": str(folder / f"{role}.allowed")}
        sections[role] = {"pools": POOLS, "control": {"curve": curve}, "timeouts": TIMEOUTS}
    sections["decode"]["pools"] = {**POOLS, "host": {"pages": 32}}
    try:
        found = Keyed.__new__(Keyed)
        found.folder = folder
        found.list_keys("prefill", first[1], bound=bound)
        found.list_keys("decode", first[0], bound=bound)
        with cluster({"preset": "tiny-v4"}, **sections) as made:
            found.live = LiveCluster(made)
            try:
                yield found
                found.live.no_traceback()
            finally:
                found.live.detach()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("bound", [True, False])
def test_both_nodes_change_their_keys_while_rooms_are_written(bound: bool) -> None:
    prefill, decode, next_prefill, next_decode = (generate_keys() for _ in range(4))
    with keyed(bound=bound, first=(prefill, decode)) as found:
        live = found.live
        assert live.reader is not None
        room = live.ticket(TOKENS)["room"]
        live.write(room, TOKENS, 0, 256)
        # The prefill node, with a room half written and another that was paired and not begun.
        waiting = live.ticket(TOKENS)["room"]
        found.list_keys("decode", prefill, next_prefill, bound=bound)
        found.change("prefill", next_prefill)
        found.noticed(live.prefill, "curve_key_changed", 1)
        live.write(room, TOKENS, 256, 512)
        assert live.address["public_key"] == next_prefill.public
        found.list_keys("decode", next_prefill, bound=bound)
        # The decode node, with the same rooms.
        found.list_keys("prefill", decode, next_decode, bound=bound)
        found.change("decode", next_decode)
        found.noticed(live.decode, "curve_key_changed", 1)
        found.list_keys("prefill", next_decode, bound=bound)
        found.noticed(live.prefill, "allowed_keys_changed", 2)
        live.write(room, TOKENS, 512, TOKENS)
        live.sender.finish(room, metadata=b"first token")
        live.read(room, TOKENS)
        live.reader.release(room)
        live.cross(TOKENS, waiting)
        live.cross(TOKENS, live.ticket(TOKENS)["room"])
        for daemon in (live.prefill, live.decode):
            assert "peer_lost" not in daemon.log(5_000)
        live.serves()
        live.detach()
        assert live.decode.stop() == 0  # a decode node that has known no former key
        live.decode.start()
        live.decode.wait_ready()
        live.cross(TOKENS, live.ticket(TOKENS)["room"])
