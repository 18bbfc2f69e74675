"""The router: a request's way through a prefill and a decode server, and the limit of requests under way.

A failure before the client's first byte ends an attempt: the router closes both requests, so the engines abort the room, and tries
another server under another room. Later failures are reported to the client.

A request may crash its server, so it visits few servers: three attempts in all, and at most one more after a connection has broken
or a server that had the request is not well any more. An attempt where nobody listens does not count, because nothing was sent.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import structlog

from kvbridge.config.schema import DispatchOrder, RouterConfig
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, InvalidInputError, NotReadyError, PeerError
from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.process import monotonic
from kvbridge.router import bodies
from kvbridge.router.bodies import Added, Asked, HeldPrompt
from kvbridge.router.servers import Server, Servers, UpstreamError
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import (
    ATTEMPTS_FAILED,
    FIRST_BYTE,
    GEN_AI_DURATION,
    GEN_AI_FIRST_TOKEN,
    ROUTED,
)
from kvbridge.telemetry.recent import Tally
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

ResultT = TypeVar("ResultT")
ATTEMPTS = 3
DEADLY = frozenset({"broken", "health"})
"""Failures that the request itself may have caused."""
ERROR_EVENT = b'data: {"error"'
EVENT_END = b"\n\n"
LONGEST_FIRST = 1 << 20
"""Limit of bytes that are searched for a stream's first two events: an error of the engine is shorter."""
UNCOUNTED_BYTES = 256 << 10
"""First bytes of each body, which `limit_bytes` does not count, so that long bodies keep no short one out."""


@dataclass
class Answer:
    """The answer for the client: decode's, or prefill's when prefill says that the client is wrong."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes]
    """Further pieces. Raises PeerError and DeadlineError."""
    order: str


class FailedAttemptError(PeerError):
    """An attempt has failed; another attempt may succeed."""

    def __init__(
        self, server: Server, reason: str, message: str, *, avoid: bool = True, answer: Answer | None = None
    ) -> None:
        """`reason`: label for metrics. `avoid`: the next attempt goes elsewhere. `answer`: a busy server's answer."""
        super().__init__(f"{server}: {message}")
        self.server, self.reason, self.avoid, self.answer = server, reason, avoid, answer


class Router:
    """Passes requests to servers, and their answers back."""

    def __init__(
        self,
        config: RouterConfig,
        servers: Servers,
        metrics: Metrics,
        seldom: Seldom,
        draw_room: Callable[[], int] = lambda: secrets.randbits(ROOM_BITS),
    ) -> None:
        self.config, self.servers, self.draw_room = config, servers, draw_room
        self._metrics, self._seldom = metrics, seldom
        self._draining = False
        self._ended = asyncio.Event()
        """Set when the last request of a draining router has ended."""
        self.cut_off = asyncio.Event()
        """Set by `end`: answers under way are cut off."""
        self.under_way = 0
        self.requests = Tally()
        """Requests that have ended, by outcome."""
        self._held_bytes = 0

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Take a place for a request before its body is read. Yield a function that takes the length of each piece of the body.

        Raises NotReadyError when the router is ending. This and the function raise CapacityError.
        """
        if self._draining:
            raise NotReadyError("the router is ending: ask another one, or again when it is back")
        if self.under_way >= self.config.limit:
            self._request_ended("none", "over_limit")
            raise CapacityError(
                f"{self.under_way} requests are under way, as many as there may be (limit); come back later, or ask another router"
            )
        arrived, counted = 0, 0

        def hold(more_bytes: int) -> None:
            nonlocal arrived, counted
            arrived += more_bytes
            growth = max(0, arrived - UNCOUNTED_BYTES) - counted
            if self._held_bytes + growth > self.config.limit_bytes:
                self._request_ended("none", "over_limit")
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
        """Accept no more requests, and wait until the answers under way have ended, or for `limit_s`."""
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                if self.under_way:
                    await self._ended.wait()
        except TimeoutError:
            log.warning("answers_cut_off", answers=self.under_way, limit_s=limit_s)

    def end(self) -> None:
        """Cut off the answers under way."""
        self._draining = True
        self.cut_off.set()

    def obstacles(self) -> tuple[str, ...]:
        """Return why requests cannot be served now."""
        return ("the router is ending",) if self._draining else self.servers.obstacles()

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """Yield an answer whose first bytes have come. All calls for the request end with the context.

        Raises NotReadyError when no server can take the request, PeerError when the attempts have failed, DeadlineError.
        """
        begun_s, order, outcome = monotonic(), "none", "client_left"
        operation = "chat" if "chat" in asked.path else "text_completion"
        try:
            async with AsyncExitStack() as stack:
                found = await self._answer_in_time(asked, stack)
                order = found.order
                self._metrics.observe(FIRST_BYTE, monotonic() - begun_s, order)
                if asked.stream:
                    self._metrics.observe(GEN_AI_FIRST_TOKEN, monotonic() - begun_s, operation)
                yield found
                outcome = "answered" if found.status < HTTPStatus.BAD_REQUEST else "refused"
        except BridgeError as error:
            outcome = "failed" if order == "none" else "broken"
            self.servers.problems.add(f"request {outcome}", asked.path, str(error))
            if self._seldom.admits("request_failed"):
                log.warning("request_failed", path=asked.path, outcome=outcome, code=error.code, reason=str(error))
            raise
        finally:
            self._request_ended(order, outcome)
            error_type = "" if outcome == "answered" else outcome
            self._metrics.observe(GEN_AI_DURATION, monotonic() - begun_s, operation, error_type)

    async def models(self, headers: dict[str, str]) -> tuple[int, bytes]:
        """Return status and body of a decode server's list of models. Raises BridgeError."""
        _, server = self.servers.choose_pair(alone=True)
        limit_s = self.config.timeouts.health_s
        with self.place():
            try:
                upstream = self.servers.upstream
                async with asyncio.timeout(limit_s), upstream.get(f"{server.url}/v1/models", headers) as found:
                    return found.status, await found.read()
            except TimeoutError:
                raise DeadlineError(f"{server} listed no models within {limit_s:g} s (timeouts.health_s)") from None

    async def _answer_in_time(self, asked: Asked, stack: AsyncExitStack) -> Answer:
        limit_s = self.config.timeouts.first_byte_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._until_answered(asked, stack)
        except TimeoutError:
            raise DeadlineError(f"no answer began within {limit_s:g} s (timeouts.first_byte_s)") from None

    async def _until_answered(self, asked: Asked, stack: AsyncExitStack) -> Answer:
        failures: list[FailedAttemptError] = []
        avoid: set[Server] = set()
        left, alone = ATTEMPTS, self._decode_alone(asked)
        while left:
            try:
                prefill, decode = self.servers.choose_pair(avoid, alone=alone)
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

    def _decode_alone(self, asked: Asked) -> bool:
        """Whether decode computes the prompt. Raises InvalidInputError where decode cannot."""
        is_sglang = any(one.directory for one in self.servers.of(Role.DECODE))
        if is_sglang and asked.decode_alone not in {"", bodies.SEVERAL_PROMPTS}:
            raise InvalidInputError(
                f"the request asks for {asked.decode_alone}: behind this router are pairs of SGLang, which give one answer without "
                "the prompt (take n, best_of, echo and prompt_logprobs out)"
            )
        return bool(asked.decode_alone) and not is_sglang

    def _blamed(self, failure: FailedAttemptError, prefill: Server | None, avoid: set[Server]) -> set[Server]:
        """Return the servers to avoid. When the only decode server fails, maybe it could not load what prefill held."""
        failed = failure.server
        others = any(not one.problem for one in set(self.servers.of(failed.role)) - avoid - {failed})
        if failed.role is Role.DECODE and failure.reason in {"status", "broken"} and prefill is not None and not others:
            return {prefill}
        return {failed} if failure.avoid else set()

    def _request_ended(self, order: str, outcome: str) -> None:
        self._metrics.count(ROUTED, order, outcome)
        self.requests.add(outcome)

    def _attempt_failed(self, failure: FailedAttemptError) -> None:
        server = failure.server
        self._metrics.count(ATTEMPTS_FAILED, server.role.value, failure.reason)
        self.servers.problems.add(f"attempt failed: {failure.reason}", f"{server.role} {server.url}", str(failure))
        if self._seldom.admits("attempt_failed"):
            log.warning("attempt_failed", peer_role=server.role.value, url=server.url, reason=str(failure))


class Attempt:
    """One attempt at a request: at most one call of a prefill server, and one at a time of a decode server."""

    def __init__(self, router: Router, asked: Asked, decode: Server) -> None:
        self._router, self._asked, self._decode_server = router, asked, decode
        self._tasks: list[asyncio.Task[Any]] = []
        self._open = AsyncExitStack()
        """The call of decode, while its answer is read."""

    async def close(self) -> None:
        """Close the calls under way. Harmless when there are none."""
        await _end(*self._tasks)
        await self._open.aclose()

    async def run(self, prefill: Server | None) -> Answer:
        """Return an answer whose first bytes have come. Raises FailedAttemptError."""
        if prefill is None:
            return await self._decode({}, "decode_alone")
        pairs = self._router.config.order is DispatchOrder.PAIRED and prefill.pairs and prefill.addresses is not None
        if pairs or prefill.directory is not None:
            return await self._run_paired(prefill, prefill.directory)
        held = await self._prefill(prefill, bodies.HOLD)
        if isinstance(held, Answer):
            return held
        prefill.addresses = held.addresses
        return await self._decode(held.added, "plain")

    async def _run_paired(self, prefill: Server, directory: bodies.Directory | None) -> Answer:
        room, told = self._router.draw_room(), prefill.addresses
        sglang = None if directory is None else bodies.sglang_members(directory)
        to_prefill, to_decode = bodies.paired_params(room, told) if sglang is None else (sglang, sglang)
        prefilling = asyncio.create_task(self._prefill(prefill, to_prefill))
        decoding = asyncio.create_task(self._decode(to_decode, "paired"))
        self._tasks += [prefilling, decoding]
        await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if decoding.done() and (decoding.exception() is None or not prefilling.done()):
            prefilling.add_done_callback(lambda done: _learn_late(prefill, done))
            return decoding.result()
        held = prefilling.result()  # when both have failed, decode failed because prefill did
        if isinstance(held, Answer):
            return held
        if directory is not None:
            return await decoding
        prefill.addresses = held.addresses
        if held.room == str(room):
            if held.addresses == told:
                return await decoding
            raise FailedAttemptError(prefill, "moved", "it has other addresses now", avoid=False)
        # The server does not take rooms from us, or holds nothing. Its parameters are valid all the same.
        prefill.pairs = held.addresses is None
        await self.close()
        return await self._decode(held.added, "plain")

    async def _prefill(self, server: Server, added: Added) -> HeldPrompt | Answer:
        return await self._unless_lost(server, self._ask_prefill(server, added))

    async def _ask_prefill(self, server: Server, added: Added) -> HeldPrompt | Answer:
        body = self._asked.for_prefill(added)
        with server.serving(self._asked.size):
            async with self._router.servers.upstream.post(server.url, body, self._asked) as upstream:
                content = await upstream.read()
        if upstream.status != HTTPStatus.OK:
            return _unless_failed(server, Answer(upstream.status, upstream.headers, content, _nothing(), "plain"))
        try:
            return HeldPrompt.read(content)
        except ValueError as error:
            raise FailedAttemptError(server, "broken", f"answered what is no completion: {error}") from error

    async def _decode(self, added: Added, order: str) -> Answer:
        return await self._unless_lost(self._decode_server, self._ask_decode(added, order))

    async def _ask_decode(self, added: Added, order: str) -> Answer:
        server, asked = self._decode_server, self._asked
        self._open.enter_context(server.serving(asked.size))
        opening = self._router.servers.upstream.post(server.url, asked.for_decode(added), asked)
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
        """Return the result of `work`, unless health checks say meanwhile that the server is lost."""
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
    """Take the addresses from an answer of prefill that came after decode's. Nobody waits for its failure any more."""
    if not done.cancelled() and done.exception() is None and isinstance(held := done.result(), HeldPrompt):
        prefill.addresses = held.addresses


def _is_clients_mistake(status: int) -> bool:
    """Whether a status says that the client is wrong. Another server would say the same."""
    return 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS


def _unless_failed(server: Server, answer: Answer) -> Answer:
    """Return an unsuccessful answer that is for the client; for any other, raise FailedAttemptError."""
    if _is_clients_mistake(answer.status):
        return answer
    why = f"answered {answer.status}: {answer.first[:300].decode(errors='replace').strip() or 'with an empty body'}"
    busy = answer.status == HTTPStatus.TOO_MANY_REQUESTS
    raise FailedAttemptError(server, "busy" if busy else "status", why, answer=answer if busy else None)


async def _first_of(server: Server, chunks: AsyncIterator[bytes], *, stream: bool) -> bytes:
    """Return the beginning of an answer: two events of a stream, because a chat's first event only names the speaker.

    An engine that fails before the first token reports the error in one of them, under a status that promised success.
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
    """Return the server's failure that an event reports; empty when the failure is the client's."""
    try:
        error = json.loads(text)["error"]
        return "" if _is_clients_mistake(int(error.get("code") or 500)) else str(error.get("message") or error)
    except (ValueError, TypeError, AttributeError):
        return text.decode(errors="replace")


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""  # makes it a generator
