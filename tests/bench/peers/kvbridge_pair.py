"""kvbridge's two daemons over Mooncake's TCP, with an engine attached to each: `KvbridgePair`.

Routers and engines are this process. What a router asks decode goes over one kept connection, as a router's does.
"""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np

from kvbridge.cli.local_cluster import DaemonProcess, wait_all_ready, wait_ended
from kvbridge.config.pools import PrefillPools
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers import synthetic
from tests.helpers.cluster import cluster

MODEL = "deepseek-v4-flash"
LAYOUT = str(PrefillPools.model_fields["device_layout"].default)
"""What a node has unless it is told otherwise."""
PAGE_TOKENS = preset(MODEL).tokens_per_page
CHUNK_TOKENS = 8192
LIMIT_S = 60.0
START_S = 300.0
"""Gigabytes are made first."""
PATIENCE = {"begin_s": 3600.0, "offer_s": 3600.0, "room_s": 3600.0}
"""Rooms that only hold pages wait for as long as the benchmark takes."""


@dataclass(frozen=True)
class Crossed:
    """A room that came through."""

    total_s: float
    phases_s: dict[str, float]
    bytes: int
    operations: int
    pages_in_a_run: float
    """Of the prompt's pages, on both sides at once."""


class KvbridgePair(AbstractContextManager["KvbridgePair"]):
    """Both daemons and both engines, with pools of `pages` pages and place for `rooms` rooms at once."""

    def __init__(self, pages: int, rooms: int, layout: str) -> None:
        self._pages, self._rooms_at_once, self._layout = pages, rooms, layout
        self._held = ExitStack()
        self._rooms = itertools.count(1)

    def __enter__(self) -> Self:
        pools = {"full": self._pages, "swa": self._rooms_at_once, "request": self._rooms_at_once}
        layout = {"device": pools, "device_layout": self._layout}
        host = {"pages": self._pages, "layout": self._layout}
        with ExitStack() as opened:
            running = opened.enter_context(
                cluster(
                    {"preset": MODEL},
                    transport="mooncake",
                    prefill={"timeouts": PATIENCE, "pools": layout},
                    decode={"timeouts": PATIENCE, "pools": layout | {"host": host}},
                    wait=False,
                )
            )
            wait_all_ready(running.all(), timeout_s=START_S)
            self._daemons = self._prefill_daemon, self._decode_daemon = running.prefill, running.decode
            control = running.prefill.endpoint().control
            assert control is not None
            self._address = control.model_dump()
            self._router = _Router(running.decode)
            opened.callback(self._router.close)
            self._sender = opened.enter_context(PrefillEngine.attach(running.prefill.runtime_dir))
            self._receiver = opened.enter_context(DecodeEngine.attach(running.decode.runtime_dir))
            self._held = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        self._held.__exit__(kind, raised, where)

    def whole_request(self, tokens: int, *, check: bool = False) -> Crossed:
        """Prefill has published all; the clock runs from decode's admission, as its router asks for it, until the claim returns."""
        room = self._written(tokens, fill=check)
        source = self._begun_tables
        self._publish(room, tokens)
        self._router.connect()
        begun_s = time.monotonic()
        self._admit(room, tokens)
        claimed = self._receiver.wait_claim(room, LIMIT_S)
        return self._over(claimed, source, tokens, time.monotonic() - begun_s, check=check)

    def published_request(self, tokens: int, *, check: bool = False) -> Crossed:
        """Both ends have admitted the room and prefill has decode's pages; the clock runs from the first `publish` to the claim."""
        room = self._written(tokens, fill=check)
        source = self._begun_tables
        self._admit(room, tokens)
        self._wait_offered(room)
        begun_s = time.monotonic()
        self._publish(room, tokens)
        claimed = self._receiver.wait_claim(room, LIMIT_S)
        return self._over(claimed, source, tokens, time.monotonic() - begun_s, check=check)

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
        self._begun_tables = self._sender.begin(room, prompt_tokens=tokens).tables
        if fill:
            whole = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
            for views in self._sender.views.values():
                synthetic.fill(views, room=room, tables=self._begun_tables, section=whole)
        return room

    def _admit(self, room: int, tokens: int) -> None:
        self._router.call("POST", "/v1/requests", {"room": room, "prompt_tokens": tokens, "prefill": [self._address]})

    def _publish(self, room: int, tokens: int) -> None:
        for upto in range(CHUNK_TOKENS, tokens, CHUNK_TOKENS):
            self._sender.publish(room, upto)
        self._sender.publish(room, tokens)
        self._sender.finish(room)

    def _wait_offered(self, room: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while "admit_to_offer_received" not in self._prefill_daemon.get(f"/v1/requests/{room}")["phases_s"]:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"room {room} was not offered within {LIMIT_S} s")
            time.sleep(0.01)

    def _over(self, claimed: DecodeRoom, source: Tables, tokens: int, total_s: float, *, check: bool) -> Crossed:
        if check:
            for views in self._receiver.views.values():
                found = synthetic.compare(views, room=claimed.room, tables=claimed.tables, tokens=tokens)
                if found.wrong_bytes or not found.checked_bytes:
                    raise RuntimeError(f"room {claimed.room}: {found}")
        self._receiver.release(claimed.room)
        for daemon in self._daemons:
            wait_ended(daemon, claimed.room)
        prefill_s = self._prefill_daemon.get(f"/v1/requests/{claimed.room}")["phases_s"]
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
    """Of a prompt's pages, C4's on decode's host."""
    places = [source[IndexSpace.FULL].ids, destination[IndexSpace.HOST].ids]
    together = np.logical_and(*(np.diff(each[: len(places[0])]) == 1 for each in places))
    return len(places[0]) / (1 + int((~together).sum()))
