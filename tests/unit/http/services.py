"""Services behind the endpoints, for tests."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Self

from fastapi import FastAPI
from pydantic import BaseModel

from kvbridge.api.rooms import (
    AdmissionRequest,
    DroppedObjects,
    DroppedPrefixes,
    RoomPage,
    RoomQuery,
    RoomReport,
    RoomTimeline,
)
from kvbridge.api.status import (
    AdmissionStatus,
    BootstrapLinkStatus,
    BootstrapStatus,
    ModelStatus,
    NodeStatus,
    Readiness,
    RegistrationState,
    StoreStatus,
)
from kvbridge.config.endpoints import HttpConfig
from kvbridge.core.errors import UnknownRoomError
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces, TokenGrant
from kvbridge.core.session.tables import RoomState
from kvbridge.http.app import AppSettings
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.pool.accounts.book import PageState
from kvbridge.telemetry.context import TRACE, TraceContext


class FakeRooms:
    """Rooms of one daemon; raises `error` when it is set."""

    role = Role.PREFILL

    def __init__(self) -> None:
        self.book = self
        self.traces: list[TraceContext | None] = []
        self.rooms: dict[int, RoomReport] = {}
        self.error: Exception | None = None
        self.waits: list[tuple[int, float, frozenset[RoomState]]] = []
        self.queries: list[RoomQuery] = []
        self.requests: list[AdmissionRequest] = []
        self.hold: asyncio.Event | None = None
        self.waiting = asyncio.Event()
        self.waited = asyncio.Event()

    async def drop_prefixes(self, *, stored: bool = True) -> DroppedPrefixes:
        if self.error:
            raise self.error
        store = DroppedObjects(outcome="dropped", objects=7) if stored else DroppedObjects(outcome="kept")
        return DroppedPrefixes(dropped_pages=12, read_pages=3, store=store)

    async def admit(self, request: AdmissionRequest, may_name: Namespaces = ANY_NAMESPACE) -> RoomReport:
        self.traces.append(TRACE.get())
        if self.error:
            raise self.error
        may_name.require(request.namespace, keyed=bool(request.page_hashes))
        self.requests.append(request)
        room = 1 if request.room is None else request.room
        self.rooms[room] = RoomReport(
            room=room,
            generation=request.generation,
            role=Role.PREFILL,
            state=RoomState.ADMITTED,
            prompt_tokens=request.prompt_tokens,
        )
        return self.rooms[room]

    def page(self, query: RoomQuery) -> RoomPage:
        self.queries.append(query)
        return RoomPage(rooms=tuple(self.rooms.values()), next=None)

    def report(self, room: int) -> RoomReport:
        if self.error:
            raise self.error
        if room not in self.rooms:
            raise UnknownRoomError(f"no room {room} here")
        return self.rooms[room]

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        self.waits.append((room, timeout_s, until))
        self.waiting.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.waited.set()
        return self.report(room)

    def timeline(self, room: int, generation: int | None) -> RoomTimeline:
        report = self.report(room)
        return RoomTimeline(room=room, generation=generation or report.generation, age_s=1.0, entries=())

    async def cancel(self, room: int, reason: str) -> RoomReport:
        self.rooms[room] = self.report(room).model_copy(update={"state": RoomState.ABORTED, "reason": reason})
        return self.rooms[room]


NODE_PAGE = NodeStatus(
    role=Role.PREFILL,
    instance="i",
    node="node-0",
    incarnation="incarnation-1",
    version="9.9",
    at=8.0,
    started_at=7.0,
    model=ModelStatus(name="tiny", fingerprint="f", tokens_per_page=256),
    memory_bytes=0,
    ready=Readiness(ready=True),
    bootstrap=BootstrapLinkStatus(state=RegistrationState.NONE, url="", problem=""),
    control="",
    ranks=(),
    engines=(),
    peers=(),
    rooms={"admitted": 1},
    admission=AdmissionStatus(waiting=0, oldest_since=None, starved_since=None, clients=()),
    pools={IndexSpace.FULL: {PageState.FREE: 8}},
    available_pages={IndexSpace.FULL: 8},
    quarantine={},
    problems=(),
    traffic={},
    fence=None,
)
BOOTSTRAP_PAGE = BootstrapStatus(
    incarnation="incarnation-1",
    version="9.9",
    at=8.0,
    started_at=7.0,
    ready=Readiness(ready=True),
    store=StoreStatus(kind="memory", problem=""),
    instances=(),
    rooms={},
    requests={},
    problems=(),
    lost=(),
)


class FakeStatus:
    """A daemon as its operators see it; its page shows how often it was made."""

    def __init__(self, page: BaseModel = NODE_PAGE) -> None:
        self.ready = Readiness(ready=True)
        self._made = itertools.count(1)
        self._page = page
        self.served: list[tuple[object, ...]] = []
        self.answers: list[tuple[str, str, int]] = []

    def readiness(self) -> Readiness:
        return self.ready

    def status(self) -> Any:
        return self._page

    def page(self) -> dict[str, Any]:
        return {"status": self._page, "made": next(self._made)}

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        return iter((b"kvbridge_rooms 1 # ", accept.encode(), b"\n")), "text/plain; version=0.0.4"

    @property
    def metrics(self) -> Self:
        """Routes and requests are noted here."""
        return self

    def serves(self, route: str, methods: Sequence[str], code: int) -> None:
        self.served.append((route, *methods, code))

    def answered(self, route: str, method: str, code: int, seconds: float) -> None:
        assert seconds >= 0
        self.answers.append((route, method, code))


def settings(tokens: Sequence[str] = (), **changes: Any) -> AppSettings:
    """`tokens`: lines of a token file."""
    grants = tuple(TokenGrant.parse(token, key="http.token_file") for token in tokens)
    return AppSettings(http=HttpConfig(**{"max_body_bytes": 4096, "max_wait_s": 5.0, **changes}), grants=lambda: grants)


def daemon_app(
    rooms: FakeRooms, status: FakeStatus | None = None, *, tokens: Sequence[str] = (), **more: Any
) -> FastAPI:
    """A daemon's application over `rooms`."""
    status = status or FakeStatus()
    status.timeline = rooms.timeline
    return create_daemon_app(rooms, rooms, status, settings(tokens, **more))
