"""What the status page asks of a daemon.

Owns: `GET /v1/events` and `GET /v1/requests/{room}/timeline`. Must not know: what a snapshot holds.

`GET /v1/events` is a stream of server-sent events behind the same token as the rest: first `snapshot` with everything that the
page shows, then a `change` a second, a JSON merge patch (RFC 7396) to it. It ends with the daemon, and for a listener that does
not keep up. It is not in /openapi.json, which has no words for an answer without an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvbridge.api.live import RoomTimeline
from kvbridge.core.errors import InvalidInputError, UnknownRoomError
from kvbridge.http.daemon_app import RoomPath
from kvbridge.http.description import problems
from kvbridge.http.feed import Feed, Listener
from kvbridge.http.numbers import NUMBER


class EventStream(Response):
    """The messages of one listener, as long as both sides want."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, listener: Listener) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed
        self._listener = listener

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        gone = asyncio.create_task(self._leave_when_gone(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (message := await self._listener.next()) is not None:
                await send({"type": "http.response.body", "body": message, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
            self._feed.leave(self._listener)

    async def _leave_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._feed.leave(self._listener)


def events_router(feed: Feed) -> APIRouter:
    """Return the route of the stream."""
    router = APIRouter(prefix="/v1/events", tags=["page"])

    @router.get("", include_in_schema=False)
    async def get_events() -> Response:
        """Send a snapshot, then what changes, each second until the connection ends."""
        return EventStream(feed, feed.join())

    return router


def timeline_router(timeline_of: Callable[[int, int | None], RoomTimeline]) -> APIRouter:
    """Return the route of timelines; `timeline_of` is given a room and a generation, and raises UnknownRoomError."""
    router = APIRouter(prefix="/v1/requests", tags=["requests"], responses=problems(InvalidInputError))

    @router.get("/{room}/timeline", responses=problems(UnknownRoomError))
    async def get_room_timeline(
        room: RoomPath,
        generation: Annotated[
            int | None, NUMBER, Query(ge=1, description="Of this attempt, not of the newest.")
        ] = None,
    ) -> RoomTimeline:
        """Return what happened to a room on this node, while it is open and for a while after its end."""
        return timeline_of(room, generation)

    return router
