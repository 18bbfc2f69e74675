"""The router: one request's way through a prefill and a decode server, and how many requests may be under way.

Until a client has had a byte, a failure is an attempt that did not succeed: both requests of the attempt are closed, which has the
engines give up what they did for it, and then another server is tried, under another room. Later failures are told to the client.

A request may be what ends its server, so it visits few: three attempts in all, and one more at most once a connection has broken,
or a server that had it is not well any more. Where nobody listens nothing was sent, so that does not count.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import structlog

from kvbridge.config.schema import DispatchOrder, RouterConfig
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, NotReadyError, PeerError
from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.process import monotonic
from kvbridge.router.bodies import HOLD, Asked, HeldPrompt, paired_params
from kvbridge.router.servers import Server, Servers
from kvbridge.router.upstream import OpenAiServers, UpstreamError
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import ATTEMPTS_FAILED, FIRST_BYTE, ROUTED
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

ResultT = TypeVar("ResultT")
Params = Mapping[str, Any]
"""`kv_transfer_params`."""

ATTEMPTS = 3
DEADLY = frozenset({"broken", "health"})
"""Failures that the request itself may have caused."""
ERROR_EVENT = b'data: {"error"'
EVENT_END = b"\n\n"
LONGEST_FIRST = 1 << 20
"""Bytes of a stream's first two events at most: an error of the engine is shorter."""
UNCOUNTED_BYTES = 256 << 10
"""First bytes of each body, which the number of requests bounds: short bodies are read where long ones have taken everything."""


@dataclass
class Answer:
    """The answer for the client: of decode, or of prefill when that says that the client is wrong."""

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


class Router:
    """Carries requests through."""

    def __init__(
        self,
        config: RouterConfig,
        servers: Servers,
        upstream: OpenAiServers,
        metrics: Metrics,
        seldom: Seldom,
        draw_room: Callable[[], int] = lambda: secrets.randbits(ROOM_BITS),
    ) -> None:
        self.config = config
        self.servers = servers
        self.upstream = upstream
        self.draw_room = draw_room
        self._metrics = metrics
        self._seldom = seldom
        self._draining = False
        self._ended = asyncio.Event()
        """Set when the router is draining and the last request has ended."""
        self.cut_off = asyncio.Event()
        """Set when answers under way are to be cut off."""
        self.under_way = 0
        self._held_bytes = 0

    # ------------------------------------------------------------------ places

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Take a place for a request, before its body is read. Yield a function that is told how many bytes of the body came.

        Both raise CapacityError, and NotReadyError when the router is ending.
        """
        if self._draining:
            raise NotReadyError("the router is ending: ask another one, or again when it is back")
        if self.under_way >= self.config.limit:
            self._metrics.count(ROUTED, "none", "over_limit")
            raise CapacityError(
                f"{self.under_way} requests are under way, as many as there may be (limit); come back later, or ask another router"
            )
        arrived, counted = 0, 0

        def hold(more_bytes: int) -> None:
            nonlocal arrived, counted
            arrived += more_bytes
            growth = max(0, arrived - UNCOUNTED_BYTES) - counted
            if self._held_bytes + growth > self.config.limit_bytes:
                self._metrics.count(ROUTED, "none", "over_limit")
                raise CapacityError(
                    f"bodies of {self._held_bytes} bytes are under way, and there may be {self.config.limit_bytes} (limit_bytes; "
                    f"the first {UNCOUNTED_BYTES} of each are not counted); send a shorter body, come back later, or ask another "
                    "router"
                )
            self._held_bytes += growth
            counted += growth

        self.under_way += 1
        try:
            yield hold
        finally:
            self.under_way -= 1
            self._held_bytes -= counted
            if self._draining and not self.under_way:
                self._ended.set()

    async def drain(self, limit_s: float) -> None:
        """Take no request more, and let answers end; those that do not end in time are told why they end here."""
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                if self.under_way:
                    await self._ended.wait()
        except TimeoutError:
            log.warning("answers_cut_off", answers=self.under_way, limit_s=limit_s)

    def end(self) -> None:
        """Cut off what is under way."""
        self._draining = True
        self.cut_off.set()

    def obstacles(self) -> tuple[str, ...]:
        """Return why requests cannot be served now."""
        return ("the router is ending",) if self._draining else self.servers.obstacles()

    # ------------------------------------------------------------------ requests

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Yield an answer whose first bytes are there; whatever is under way for the request ends with the context.

        Raises NotReadyError when nobody can serve it, PeerError when the attempts have failed, DeadlineError.
        """
        begun_s, order, outcome = monotonic(), "none", "client_left"
        try:
            async with AsyncExitStack() as stack:
                found = await self._in_time(asked, stack)
                order = found.order
                self._metrics.observe(FIRST_BYTE, monotonic() - begun_s, order)
                yield found
                outcome = "answered" if found.status < HTTPStatus.BAD_REQUEST else "refused"
        except BridgeError as error:
            outcome = "failed" if order == "none" else "broken"
            if self._seldom.admits("request_failed"):
                log.warning("request_failed", path=asked.path, outcome=outcome, code=error.code, reason=str(error))
            raise
        finally:
            self._metrics.count(ROUTED, order, outcome)

    async def models(self, headers: dict[str, str]) -> tuple[int, bytes]:
        """Return what a decode server says of its models: status, body. Raises BridgeError."""
        _, server = self.servers.choose_pair(alone=True)
        limit_s = self.config.timeouts.health_s
        with self.place():
            try:
                async with asyncio.timeout(limit_s), self.upstream.get(f"{server.url}/v1/models", headers) as found:
                    return found.status, await found.read()
            except TimeoutError:
                raise DeadlineError(
                    f"{server} did not say all of its models within {limit_s:g} s (timeouts.health_s)"
                ) from None

    async def _in_time(self, asked: Asked, stack: AsyncExitStack) -> Answer:
        limit_s = self.config.timeouts.first_byte_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._until_answered(asked, stack)
        except TimeoutError:
            raise DeadlineError(
                f"no server sent the first byte of an answer within {limit_s:g} s (timeouts.first_byte_s)"
            ) from None

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
                self._attempt_failed(failure)
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
        """Return who is not asked again. Where decode is the only one left, maybe it could not load what prefill held."""
        failed = failure.server
        others = any(not one.problem for one in set(self.servers.of(failed.role)) - avoid - {failed})
        if failed.role is Role.DECODE and failure.reason in {"status", "broken"} and prefill is not None and not others:
            return {prefill}
        return {failed} if failure.avoid else set()

    def _attempt_failed(self, failure: FailedAttemptError) -> None:
        server = failure.server
        self._metrics.count(ATTEMPTS_FAILED, server.role.value, failure.reason)
        if self._seldom.admits("attempt_failed"):
            log.warning("attempt_failed", peer_role=server.role.value, url=server.url, reason=str(failure))


class Attempt:
    """One try of one request: one request to a prefill server at most, and one at a time to a decode server."""

    def __init__(self, router: Router, asked: Asked, decode: Server) -> None:
        self._router = router
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
        if self._router.config.order is DispatchOrder.PAIRED and prefill.pairs and prefill.addresses is not None:
            return await self._run_paired(prefill)
        held = await self._prefill(prefill, HOLD)
        if isinstance(held, Answer):
            return held
        prefill.addresses = held.addresses
        return await self._decode(held.params, "plain")

    async def _run_paired(self, prefill: Server) -> Answer:
        room, told = self._router.draw_room(), prefill.addresses
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
            async with self._router.upstream.post(server.url, self._asked.for_prefill(params), self._asked) as upstream:
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
        opening = self._router.upstream.post(server.url, asked.for_decode(params), asked)
        upstream = await self._open.enter_async_context(opening)
        if upstream.status != HTTPStatus.OK:
            content = await upstream.read()
            return _unless_failed(server, Answer(upstream.status, upstream.headers, content, _nothing(), order))
        chunks = upstream.chunks()
        first = await _first_of(server, chunks, stream=asked.stream)
        return Answer(upstream.status, upstream.headers, first, self._rest(server, chunks), order)

    async def _rest(self, server: Server, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        idle_s = self._router.config.timeouts.idle_s
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
        """Return what `work` returns, unless the server's health says that it will not answer."""
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
    """Learn from an answer of prefill that came after that of decode. A failure concerns nobody any more."""
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
    """Return the beginning of an answer: of a stream two events, since the first of a chat only says whose turn it is.

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
