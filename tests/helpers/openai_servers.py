"""Small servers of the OpenAI API that behave as those of vLLM or SGLang do, and fail when they are told to."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from kvbridge.config.endpoints import HttpConfig
from kvbridge.http.server import HttpServer
from kvbridge.telemetry.logs import Seldom

WAIT_S = 60.0
ADDRESSES = [{"endpoint": "tcp://10.0.0.7:7801", "public_key": ""}]


class HeldRooms:
    """Rooms that prefill servers hold: decode servers wait for them."""

    def __init__(self) -> None:
        self._held: dict[str, asyncio.Event] = {}

    def of(self, room: str) -> asyncio.Event:
        return self._held.setdefault(room, asyncio.Event())


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when whoever sent it has closed the connection before the answer's end."""
    answered: bool = False

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params", {})

    @property
    def ours(self) -> dict[str, Any]:
        return self.params.get("kvbridge", {})

    @property
    def room(self) -> Any:
        return self.ours.get("room", self.body.get("bootstrap_room"))


class Closed(Exception):  # noqa: N818 - no error
    """The server is to close the connection where it is."""


class OpenAiServer:
    """One server. `connector`: `kvbridge`, `kvbridge-plain` (of a release that draws its own rooms) or `nixl`."""

    def __init__(self, rooms: HeldRooms, *, name: str, connector: str = "kvbridge") -> None:
        self.rooms = rooms
        self.name = name
        self.connector = connector
        self.addresses: Any = ADDRESSES
        self.info: dict[str, Any] = {}
        """The answer to /server_info; without any it is 404."""
        self.received: list[Received] = []
        self.came = asyncio.Condition()
        self.status = 200
        self.health = 200
        self.hangs = False
        """Whether /health is not answered."""
        self.gate: asyncio.Event | None = None
        """An answer waits for it."""
        self.between: Callable[[int], asyncio.Event | None] = lambda _number: None
        """The piece of this number of a stream waits for it."""
        self.breaks_at: int | None = None
        """The piece before which the connection is closed."""
        self.pieces = ["one", " two", " three"]
        self.begins_with_error: int | None = None
        """The code of an error that a stream says under a status of 200."""
        self._server: HttpServer | None = None
        self._drawn = 0

    async def start(self, port: int = 0) -> None:
        self._server = HttpServer(self, HttpConfig(port=port), few_lines(), shutdown_s=5.0)

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    async def request(self, number: int) -> Received:
        async with asyncio.timeout(WAIT_S), self.came:
            await self.came.wait_for(lambda: len(self.received) > number)
        return self.received[number]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            if self.hangs:
                await _closed(receive)
                return
            await _respond(send, self.health, b"", "text/plain")
        elif scope["path"] == "/v1/models":
            await _respond(send, 200, json.dumps({"data": [{"id": self.name}]}).encode())
        elif scope["path"] == "/server_info":
            await _respond(send, self.info.get("status", 200) if self.info else 404, json.dumps(self.info).encode())
        else:
            await self._complete(scope, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        content, more = b"", True
        while more:
            message = await receive()
            content += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        received = Received(scope["path"], headers, json.loads(content))
        async with self.came:
            self.received.append(received)
            self.came.notify_all()
        answering = asyncio.create_task(self._answer(received, send))
        leaving = asyncio.create_task(_closed(receive))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            received.left.set()
        answering.cancel()
        leaving.cancel()
        results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(results[0], Closed):
            return  # without the end of the answer: the connection is closed
        if isinstance(results[0], Exception):
            raise results[0]

    async def _answer(self, received: Received, send: Send) -> None:
        if self.gate is not None and not received.body.get("stream"):
            await self.gate.wait()
        if self.breaks_at == 0:
            raise Closed
        if self.status != 200:
            document = {"error": {"message": f"{self.name} says {self.status}", "code": self.status}}
            headers = [(b"retry-after", b"7")] if self.status == 429 else []
            await _respond(send, self.status, json.dumps(document).encode(), more=headers)
        elif received.params.get("do_remote_decode"):
            await _respond(send, 200, json.dumps(self._held(received)).encode())
        else:
            if self.info.get("disaggregation_mode") == "prefill":
                self.rooms.of(received.room).set()
            elif received.room is not None:
                await self.rooms.of(received.room).wait()
            await (self._stream(send) if received.body.get("stream") else self._whole(received, send))
        received.answered = True

    def _held(self, received: Received) -> dict[str, Any]:
        answer = {"id": "p", "choices": [{"text": "one", "finish_reason": "length"}]}
        if self.connector == "nixl":
            return answer | {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}}
        room = received.ours.get("room") if self.connector == "kvbridge" else None
        if room is None:
            self._drawn += 1
            room = f"{self.name}-{self._drawn}"
        self.rooms.of(room).set()
        params = {"do_remote_prefill": True, "kvbridge": {"room": room, "prefill": self.addresses}}
        return answer | {"kv_transfer_params": params}

    async def _whole(self, received: Received, send: Send) -> None:
        document = {"id": self.name, "model": received.body.get("model"), "choices": [{"text": "".join(self.pieces)}]}
        content = json.dumps(document).encode()
        if self.breaks_at is not None:
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": content[:10], "more_body": True})
            if (waits_for := self.between(0)) is not None:
                await waits_for.wait()
            raise Closed
        await _respond(send, 200, content)

    def events(self) -> list[bytes]:
        """Return what a stream consists of, the role first, as in a chat."""
        choices = [{"delta": {"role": "assistant"}}, *({"delta": {"content": piece}} for piece in self.pieces)]
        return [b"data: %s\n\n" % json.dumps({"choices": [one]}).encode() for one in choices] + [b"data: [DONE]\n\n"]

    async def _stream(self, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-of-the-engine", self.name.encode())]
        # vLLM promises success before it has a token.
        await send({"type": "http.response.start", "status": 200, "headers": head})
        if self.gate is not None:
            await self.gate.wait()
        events = self.events()
        if self.begins_with_error is not None:
            document = {"error": {"message": "it went wrong", "code": self.begins_with_error}}
            events = [events[0], b"data: %s\n\n" % json.dumps(document).encode(), events[-1]]
        for number, event in enumerate(events):
            if number == self.breaks_at:
                raise Closed
            if (waits_for := self.between(number)) is not None:
                await waits_for.wait()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _respond(
    send: Send, status: int, content: bytes, kind: str = "application/json", more: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def few_lines() -> Seldom:
    return Seldom(lambda _event: None)
