"""One request's way through a prefill and a decode server, until the first bytes of its answer are there.

Until a client has had a byte, a failure is an attempt that did not succeed: both requests of it are closed, which has the engines
give up what they did for it, and then another server is tried, under another room. After that, whoever sends the bytes on tells it.

A request may be what ends its server, so it visits few: three attempts in all, and one more at most once a connection has broken,
or a server that had it is not well any more. Where nobody listens nothing was sent, so that does not count.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from kvbridge.config.router import DispatchOrder, RouterTimeouts
from kvbridge.core.errors import DeadlineError, NotReadyError, PeerError
from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.router.bodies import HOLD, Asked, Body, HeldPrompt, paired_params
from kvbridge.router.servers import Server, Servers

ResultT = TypeVar("ResultT")
Params = Mapping[str, Any]
"""`kv_transfer_params`."""

ATTEMPTS = 3
DEADLY = frozenset({"broken", "health"})
"""Failures that the request itself may have caused."""
ERROR_EVENT = b'data: {"error"'
EVENT_END = b"\n\n"
LONGEST_FIRST = 1 << 20
"""Of a stream's first two events: what is longer is no error of the engine."""


class UpstreamError(PeerError):
    """A server could not be reached, or its answer broke off."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        """`refused`: no connection was made, so nothing was sent."""
        super().__init__(message)
        self.refused = refused


class Upstream(Protocol):
    """An answer whose status and headers are there."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def chunks(self) -> AsyncIterator[bytes]:
        """Its body, in pieces as they come. Raises UpstreamError."""

    async def read(self) -> bytes:
        """Return the rest of its body. Raises UpstreamError."""


class Post(Protocol):
    """How requests are sent."""

    def __call__(self, url: str, body: Body, asked: Asked) -> AbstractAsyncContextManager[Upstream]:
        """Send one; its connection is closed with the context unless all of the answer was read. Raises UpstreamError."""


@dataclass
class Answer:
    """What the client gets: of decode, or of prefill when that says that the client is wrong."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes]
    """Pieces behind the first. Raises UpstreamError and DeadlineError."""
    order: str


class FailedAttemptError(PeerError):
    """An attempt has failed; another one may not."""

    def __init__(
        self, server: Server, reason: str, message: str, *, avoid: bool = True, answer: Answer | None = None
    ) -> None:
        """`reason` is a word for metrics; `avoid`: the next attempt goes elsewhere; `answer`: what the server says of its load."""
        super().__init__(f"{server}: {message}")
        self.server = server
        self.reason = reason
        self.avoid = avoid
        self.answer = answer


@dataclass(frozen=True)
class Exchanges:
    """Carries requests through."""

    servers: Servers
    post: Post
    order: DispatchOrder
    timeouts: RouterTimeouts
    failed: Callable[[FailedAttemptError], None]
    """Told of each attempt that has failed."""
    draw_room: Callable[[], int] = field(default=lambda: secrets.randbits(ROOM_BITS))

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Yield an answer whose first bytes are there; whatever is under way for it ends with the context.

        Raises NotReadyError when nobody can serve it, PeerError when the attempts have failed, DeadlineError.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self.timeouts.first_byte_s):
                    found = await self._until_answered(asked, stack)
            except TimeoutError:
                raise DeadlineError(
                    f"no server sent the first byte of an answer within {self.timeouts.first_byte_s:g} s (timeouts.first_byte_s)"
                ) from None
            yield found

    async def _until_answered(self, asked: Asked, stack: AsyncExitStack) -> Answer:
        failures: list[FailedAttemptError] = []
        avoid: set[Server] = set()
        left = ATTEMPTS
        while left:
            try:
                prefill, decode = self.servers.choose_pair(avoid, alone=bool(asked.decode_alone))
            except NotReadyError:
                if failures:
                    break
                raise
            attempt = Attempt(self, asked, decode)
            try:
                found = await attempt.run(prefill)
            except FailedAttemptError as failure:
                await attempt.close()
                failures.append(failure)
                avoid |= self._blamed(failure, prefill, avoid)
                self.failed(failure)
                if failure.reason != "connect":
                    left = min(left - 1, 1) if failure.reason in DEADLY else left - 1
            except BaseException:
                await attempt.close()
                raise
            else:
                stack.push_async_callback(attempt.close)
                return found
        answers = [failure.answer for failure in failures if failure.reason != "connect"]
        if answers and all(answers) and answers[-1] is not None:
            return answers[-1]
        tried = "; ".join(dict.fromkeys(map(str, failures)))
        raise PeerError(f"nothing was answered, and {len(failures)} attempts have failed: {tried}")

    def _blamed(self, failure: FailedAttemptError, prefill: Server | None, avoid: set[Server]) -> set[Server]:
        """Return who is not asked again. Where decode is the only one left it may be that it could not load what prefill held."""
        failed = failure.server
        others = any(not one.problem for one in set(self.servers.of(failed.role)) - avoid - {failed})
        if failed.role is Role.DECODE and failure.reason in {"status", "broken"} and prefill is not None and not others:
            return {prefill}
        return {failed} if failure.avoid else set()


class Attempt:
    """One try of one request: one request to a prefill server at most, and one at a time to a decode server."""

    def __init__(self, exchanges: Exchanges, asked: Asked, decode: Server) -> None:
        self._exchanges = exchanges
        self._asked = asked
        self._decode_server = decode
        self._tasks: list[asyncio.Task[Any]] = []
        self._open = AsyncExitStack()
        """The request to decode, while its answer is read."""

    async def close(self) -> None:
        """Close the requests that are under way. Harmless when none is."""
        await _end(*self._tasks)
        await self._open.aclose()

    async def run(self, prefill: Server | None) -> Answer:
        """Return an answer whose first bytes are there. Raises FailedAttemptError."""
        if prefill is None:
            return await self._decode(None, "decode_alone")
        if self._exchanges.order is DispatchOrder.PAIRED and prefill.pairs and prefill.addresses is not None:
            return await self._run_paired(prefill)
        held = await self._prefill(prefill, HOLD)
        if isinstance(held, Answer):
            return held
        prefill.addresses = held.addresses
        return await self._decode(held.params, "plain")

    async def _run_paired(self, prefill: Server) -> Answer:
        room, told = self._exchanges.draw_room(), prefill.addresses
        to_prefill, to_decode = paired_params(room, told)
        prefilling = asyncio.create_task(self._prefill(prefill, to_prefill))
        decoding = asyncio.create_task(self._decode(to_decode, "paired"))
        self._tasks += [prefilling, decoding]
        await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if decoding.done() and (decoding.exception() is None or not prefilling.done()):
            prefilling.add_done_callback(lambda done: _learn_late(prefill, done))
            return decoding.result()
        held = prefilling.result()  # where both have failed, decode has because prefill has
        if isinstance(held, Answer):
            return held
        prefill.addresses = held.addresses
        if held.is_in(room) and held.addresses == told:
            return await decoding
        if held.is_in(room):
            raise FailedAttemptError(prefill, "moved", "it has other addresses now", avoid=False)
        # It does not take rooms from us, or holds nothing: what it says is good all the same.
        prefill.pairs = held.addresses is None
        await self.close()
        return await self._decode(held.params, "plain")

    # ------------------------------------------------------------------ one server

    async def _prefill(self, server: Server, params: Params) -> HeldPrompt | Answer:
        return await self._unless_lost(server, self._ask_prefill(server, params))

    async def _ask_prefill(self, server: Server, params: Params) -> HeldPrompt | Answer:
        with server.serving(self._asked.size):
            async with self._exchanges.post(server.url, self._asked.for_prefill(params), self._asked) as upstream:
                content = await upstream.read()
        if upstream.status != HTTPStatus.OK:
            return _unless_failed(server, Answer(upstream.status, upstream.headers, content, _nothing(), "plain"))
        try:
            return HeldPrompt.read(content)
        except ValueError as error:
            raise FailedAttemptError(server, "broken", f"answered what is no completion: {error}") from error

    async def _decode(self, params: Params | None, order: str) -> Answer:
        return await self._unless_lost(self._decode_server, self._ask_decode(params, order))

    async def _ask_decode(self, params: Params | None, order: str) -> Answer:
        server, asked = self._decode_server, self._asked
        self._open.enter_context(server.serving(asked.size))
        opening = self._exchanges.post(server.url, asked.for_decode(params), asked)
        upstream = await self._open.enter_async_context(opening)
        if upstream.status != HTTPStatus.OK:
            content = await upstream.read()
            return _unless_failed(server, Answer(upstream.status, upstream.headers, content, _nothing(), order))
        chunks = upstream.chunks()
        first = await _first_of(server, chunks, stream=asked.stream)
        return Answer(upstream.status, upstream.headers, first, self._rest(server, chunks), order)

    async def _rest(self, server: Server, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        idle_s = self._exchanges.timeouts.idle_s
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise DeadlineError(f"{server} sent nothing for {idle_s:g} s (timeouts.idle_s)") from None
            except UpstreamError as error:
                raise PeerError(f"{server}: {error}") from error
            if chunk is None:
                return
            yield chunk

    async def _unless_lost(self, server: Server, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what `work` returns, unless the server's health says that it will not come to it."""
        working, lost = asyncio.create_task(work), asyncio.create_task(server.lost.wait())
        try:
            await asyncio.wait({working, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise FailedAttemptError(server, "health", f"is not well any more: {server.problem}")
            return working.result()
        except UpstreamError as error:
            if error.refused:
                server.is_gone(str(error))
            raise FailedAttemptError(server, "connect" if error.refused else "broken", str(error)) from error
        finally:
            await _end(working, lost)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _learn_late(prefill: Server, done: asyncio.Task[HeldPrompt | Answer]) -> None:
    """Learn from an answer of prefill that came after that of decode; whether it failed concerns nobody any more."""
    if not done.cancelled() and done.exception() is None and isinstance(held := done.result(), HeldPrompt):
        prefill.addresses = held.addresses


def _is_clients_mistake(status: int) -> bool:
    """Whether a status says that the client is wrong, which another server would say as well."""
    return 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS


def _unless_failed(server: Server, answer: Answer) -> Answer:
    """Return an answer that is no success when it is for the client. Raises FailedAttemptError."""
    if _is_clients_mistake(answer.status):
        return answer
    shown = answer.first[:300].decode(errors="replace").strip()
    why = f"answered {answer.status}: {shown or 'without a word'}"
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
        raise FailedAttemptError(server, "busy", why, answer=answer)
    raise FailedAttemptError(server, "status", why)


async def _first_of(server: Server, chunks: AsyncIterator[bytes], *, stream: bool) -> bytes:
    """Return the beginning of an answer: of a stream two events, since the first of a chat says only whose turn it is.

    An engine that fails before the first token says so in one of them, under a status that promised success.
    """
    first = b""
    async for chunk in chunks:
        first += chunk
        if not stream or first.count(EVENT_END) > 1 or len(first) > LONGEST_FIRST:
            break
    if not first:
        raise FailedAttemptError(server, "broken", "ended its answer before the first byte")
    for event in first.split(EVENT_END)[:2]:
        if event.startswith(ERROR_EVENT) and (error := _server_error(event.removeprefix(b"data: "))):
            raise FailedAttemptError(server, "status", f"began its answer with an error: {error}")
    return first


def _server_error(text: bytes) -> str:
    """Return what an event says of the server's failure; empty when it is the client's."""
    try:
        error = json.loads(text)["error"]
        return "" if _is_clients_mistake(int(error.get("code") or 500)) else str(error.get("message") or error)
    except (ValueError, TypeError, AttributeError):
        return text.decode(errors="replace")


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""  # makes it a generator
