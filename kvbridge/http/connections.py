"""One HTTP connection: the time that its caller may take, and the turn of its requests.

uvicorn has no limit on the time of a request, and reads every readable socket in turn. A thousand callers would then get a thousand
times the processor time of one engine, and open rooms would stop while new ones are refused. Here the loop looks at all sockets
again between two requests, and a request behind too many others is answered 503 before anybody reads it.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvbridge.api.problems import PROBLEM_TYPE, problem_of
from kvbridge.core.errors import CapacityError
from kvbridge.core.process import Clock, monotonic
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

MOST_WAITING = 128
_HEAD_ENDS = re.compile(rb"\n\r?\n")
_FIRST_PRINTABLE = 0x21
"""No request begins with a smaller byte. A TLS handshake on a port without TLS does: it waits among the POSTs to be refused."""
HEAD_BYTES = 16_384
"""h11 refuses a request whose head is longer."""


def refusal(why: str) -> bytes:
    """Return the answer to an unread request."""
    body = problem_of(CapacityError(why), path="").model_dump_json(exclude_none=True).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {PROBLEM_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class Line(Enum):
    """A queue of callers by their kind of request. Each queue moves by itself."""

    OTHER = auto()
    """A health check, a report, or the cancellation of a room, which gives pages back."""
    CREATES = auto()
    """A POST."""
    GOES_ON = auto()
    """The rest of a begun request. Nobody is turned away here."""


LONGEST_WAIT_S = {Line.OTHER: 1.0, Line.CREATES: 0.1}
"""A line of MOST_WAITING callers turns others away after its first caller has waited this long, so a burst or a pause of the
process turns nobody away. A refused POST is told to stay away for at least 0.1 s (`admission.retry_after_min_s`), so a longer wait
for a refusal helps nobody. Health checks usually give up after 1 s."""
TOO_MANY_WAIT = {
    line: refusal(
        f"{MOST_WAITING} requests or more wait here to be read, the first of them for {wait_s:g} s already: this daemon is asked "
        "for more than it can answer; this request has not been read"
    )
    for line, wait_s in LONGEST_WAIT_S.items()
}


class Turns:
    """Reads one request of each line, and then lets the event loop look at all its sockets again."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock = monotonic) -> None:
        """`call_soon(do)` calls `do` after the loop has looked at its sockets once more."""
        self._call_soon, self._clock = call_soon, clock
        self._lines: dict[Line, deque[tuple[float, Callable[[], None]]]] = {line: deque() for line in Line}
        self._taken = False

    def wait(self, read: Callable[[], None], line: Line) -> bool:
        """Call `read` now or in its turn. Return False, without a call, when the line is too long."""
        now_s, waiting = self._clock(), self._lines[line]
        longest_s = LONGEST_WAIT_S.get(line)
        if longest_s is not None and len(waiting) >= MOST_WAITING and now_s - waiting[0][0] >= longest_s:
            return False
        waiting.append((now_s, read))
        if not self._taken:
            self._next()
        return True

    def _next(self) -> None:
        self._taken = any(self._lines.values())
        if not self._taken:
            return
        self._call_soon(self._next)
        for waiting in self._lines.values():
            if waiting:
                waiting.popleft()[1]()


class _Timer:
    """Calls `late` when the limit has passed after `start`, unless `stop` comes first."""

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        self._limit_s, self._late = limit_s, late
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, unless the timer runs already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._limit_s, self._late)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with limits, whose requests wait for their turn."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        turns: Turns,
        when_ended: Callable[[], None],
        *,
        request_s: float,
        seldom: Seldom,
    ) -> None:
        """`request_s` (`http.max_request_s`) begins with the connection, or with the first byte after an answer.

        The last byte of a request must arrive within this time. A TLS handshake before the request may take as long. A caller must
        also take some of its answer within this time.
        """
        super().__init__(config, state, {})
        self._turns, self._when_ended, self._seldom = turns, when_ended, seldom
        self._ended = False
        self._unread = b""
        """Received bytes before h11 gets them."""
        self._waits = False
        """Whether this connection waits for its turn."""
        self._late = False
        """Whether the request's time ran out while it waited for its turn."""
        self._request_timer = _Timer(request_s, self._too_slow)
        self._answer_timer = _Timer(request_s, self._not_taken)
        """Runs while the caller must take some of its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._request_timer.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        super().connection_lost(exc)
        self._request_timer.stop()
        self._answer_timer.stop()
        self._when_ended()

    # ---------------------------------------------------------------------------- requests

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += data
        if len(self._unread) > HIGH_WATER_LIMIT:
            self.transport.pause_reading()
        self._seek_turn()

    def handle_events(self) -> None:
        """Seek a turn for the next request: uvicorn calls this at the end of an answer."""
        self._seek_turn()

    def _seek_turn(self) -> None:
        line = None if self._waits else self._line()
        if line is None:
            return
        self._waits = True
        if not self._turns.wait(self.take_turn, line):
            self._waits, self._unread = False, b""
            if self._seldom.admits("request_refused_unread"):
                log.warning("request_refused_unread", waiting=MOST_WAITING, waited_s=LONGEST_WAIT_S[line])
            self.transport.write(TOO_MANY_WAIT[line])
            self.transport.close()
            self._expect_end()

    def _line(self) -> Line | None:
        """Return the line for this connection; None: its request is unknown yet, or an answer has to be sent first."""
        if self.conn.their_state is h11.SEND_BODY:
            return Line.GOES_ON
        if self.conn.our_state is not h11.IDLE or self.conn.their_state is not h11.IDLE:
            return None
        # h11 has the beginning of a request already if it came in one segment with the request before.
        head = self.conn.trailing_data[0] + self._unread
        if not head:
            return None
        self._unset_keepalive_if_required()
        self._request_timer.start()
        if head[0] < _FIRST_PRINTABLE:
            return Line.CREATES
        if not _HEAD_ENDS.search(head):
            return Line.CREATES if len(head) > HEAD_BYTES else None
        return Line.CREATES if head.startswith(b"POST ") else Line.OTHER

    def take_turn(self) -> None:
        """Give h11 the received bytes. Nothing begins for a caller that has hung up meanwhile."""
        data, self._unread, self._waits = self._unread, b"", False
        if self._ended or self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        try:
            if data:  # h11 takes no data for the end of the connection
                self.conn.receive_data(data)
            super().handle_events()
        except Exception:
            self.transport.abort()
            raise
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._request_timer.stop()  # the request is whole; the application bounds the time of its answer
            self._late = False
        elif self._late:
            self._too_slow()
        else:
            self._request_timer.start()
        self._expect_end()

    def _too_slow(self) -> None:
        self._late = True
        if not self._waits:  # a request that waits may be whole: `take_turn` sees that
            log.debug("connection_closed", reason="no whole request in time", limit="http.max_request_s")
            self.transport.abort()

    # ---------------------------------------------------------------------------- answers

    # A connection closes after everything written to it was sent, so a caller that takes nothing would keep it for ever.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer.start()

    def resume_writing(self) -> None:
        self._answer_timer.stop()
        super().resume_writing()
        self._expect_end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_end()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_end()

    def _expect_end(self) -> None:
        if self.transport.is_closing() and not self._ended:
            self._answer_timer.start()

    def _not_taken(self) -> None:
        log.debug("connection_closed", reason="nothing of an answer was taken in time", limit="http.max_request_s")
        self.transport.abort()
