"""kvbridge's two daemons over Mooncake's TCP, with an engine attached to each; this process is router and engines."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvbridge.cli.local_cluster import DaemonProcess, wait_all_ready, wait_ended
from kvbridge.config.pools import PrefillPools
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Tables
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers.cluster import Cluster, cluster, eventually
from tests.helpers.live_rooms import check_rows, control_of, fill as fill_rows

MODEL = "deepseek-v4-flash"
LAYOUT = str(PrefillPools.model_fields["device_layout"].default)
"""The defaults of a node."""
PAGE_TOKENS = preset(MODEL).tokens_per_page
CHUNK_TOKENS = 8192
LIMIT_S = 60.0
START_S = 300.0
PATIENCE = {"begin_s": 3600.0, "offer_s": 3600.0, "room_s": 3600.0}
"""Rooms that only hold pages wait for as long as the benchmark takes."""


@dataclass(frozen=True)
class Crossed:
    total_s: float
    phases_s: dict[str, float]
    bytes: int
    operations: int
    pages_in_a_run: float
    """Pages of the prompt, on both sides at once."""


@contextmanager
def kvbridge_pair(pages: int, rooms: int, layout: str) -> Iterator[KvbridgePair]:
    pools = {"device": {"full": pages, "swa": rooms, "request": rooms}, "device_layout": layout}
    host = {"pages": pages, "layout": layout}
    with cluster(
        {"preset": MODEL},
        transport="mooncake",
        prefill={"timeouts": PATIENCE, "pools": pools},
        decode={"timeouts": PATIENCE, "pools": pools | {"host": host}},
        wait=False,
    ) as running:
        wait_all_ready(running.all(), timeout_s=START_S)
        with (
            closing(_Router(running.decode)) as router,
            PrefillEngine.attach(running.prefill.runtime_dir) as sender,
            DecodeEngine.attach(running.decode.runtime_dir) as receiver,
        ):
            yield KvbridgePair(running, router, sender, receiver, pages)


class KvbridgePair:
    def __init__(self, running: Cluster, router: _Router, sender: PrefillEngine, receiver: DecodeEngine, pages: int):
        self._daemons = self._prefill_daemon, _ = running.prefill, running.decode
        self._router, self._sender, self._receiver, self._pages = router, sender, receiver, pages
        self._rooms = itertools.count(1)
        self._address = control_of(running.prefill)

    def whole_request(self, tokens: int, *, check: bool = False) -> Crossed:
        """Prefill has published all; the clock runs from decode's admission, as its router asks for it, until the claim returns."""
        room = self._written(tokens, fill=check)
        source = self._begun.tables
        self._publish(tokens)
        self._router.connect()
        begun_s = time.monotonic()
        self._admit(room, tokens)
        claimed = self._receiver.claim(room, timeout_s=LIMIT_S)
        return self._over(claimed, source, time.monotonic() - begun_s, check=check)

    def published_request(self, tokens: int, *, check: bool = False) -> Crossed:
        """Both ends have admitted the room and prefill has decode's pages; the clock runs from the first `publish` to the claim."""
        room = self._written(tokens, fill=check)
        source = self._begun.tables
        self._admit(room, tokens)
        self._wait_offered(room)
        begun_s = time.monotonic()
        self._publish(tokens)
        claimed = self._receiver.claim(room, timeout_s=LIMIT_S)
        return self._over(claimed, source, time.monotonic() - begun_s, check=check)

    @contextmanager
    def used(self, run_pages: int) -> Iterator[None]:
        """While this lasts, both pools have free pages in runs of so many only: rooms that wait hold the others."""
        tokens = run_pages * PAGE_TOKENS
        rooms = []
        for _ in range(self._pages // run_pages):
            rooms.append(next(self._rooms))
            self._sender.admit(rooms[-1], prompt_tokens=tokens)
            self._admit(rooms[-1], tokens)
        self._cancel(rooms[1::2])
        try:
            yield
        finally:
            self._cancel(rooms[::2])

    def _written(self, tokens: int, *, fill: bool) -> int:
        room = next(self._rooms)
        self._sender.admit(room, prompt_tokens=tokens)
        self._begun = self._sender.begin(room, prompt_tokens=tokens)
        if fill:
            fill_rows(self._sender, self._begun)
        return room

    def _admit(self, room: int, tokens: int) -> None:
        self._router.call("POST", "/v1/requests", {"room": room, "prompt_tokens": tokens, "prefill": [self._address]})

    def _publish(self, tokens: int) -> None:
        for upto in range(CHUNK_TOKENS, tokens, CHUNK_TOKENS):
            self._begun.publish(upto)
        self._begun.publish(tokens)
        self._begun.finish()

    def _wait_offered(self, room: int) -> None:
        path = f"/v1/requests/{room}"
        eventually("offer", lambda: "admit_to_offer_received" in self._prefill_daemon.get(path)["phases_s"], LIMIT_S)

    def _over(self, claimed: DecodeRoom, source: Tables, total_s: float, *, check: bool) -> Crossed:
        if check:
            check_rows(self._receiver, claimed)
        claimed.release()
        for daemon in self._daemons:
            wait_ended(daemon, claimed.id)
        prefill_s = self._prefill_daemon.get(f"/v1/requests/{claimed.id}")["phases_s"]
        amounts = claimed.amounts.values()
        return Crossed(
            total_s,
            claimed.phases_s | {"offer_to_sent": prefill_s["offer_to_sent"]},
            sum(each.bytes for each in amounts),
            sum(each.operations for each in amounts),
            _pages_in_a_run(source, claimed.tables),
        )

    def _cancel(self, rooms: list[int]) -> None:
        for room in rooms:
            self._router.call("DELETE", f"/v1/requests/{room}", {})
        for room in rooms:
            for daemon in self._daemons:
                wait_ended(daemon, room)


class _Router:
    """A connection to the decode daemon, which is kept for a few seconds there."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(daemon.url).netloc, timeout=LIMIT_S)
        self.close = self._connection.close

    def connect(self) -> None:
        self.close()
        self._connection.connect()

    def call(self, method: str, path: str, body: dict[str, Any]) -> None:
        if not self._connection.sock:
            self.connect()
        self._connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        self.close()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:500]!r}")


def _pages_in_a_run(source: Tables, destination: Tables) -> float:
    """Pages of a prompt; those of C4 are on decode's host."""
    places = [source[IndexSpace.FULL].ids, destination[IndexSpace.HOST].ids]
    together = np.logical_and(*(np.diff(each[: len(places[0])]) == 1 for each in places))
    return len(places[0]) / (1 + int((~together).sum()))
