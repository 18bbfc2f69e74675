"""How long a caller may take over its request, how many callers there may be, and that their requests take turns.

Both limits hold for whoever reaches the port, with or without a token: a connection that says nothing, sends a byte now and then,
or takes nothing of its answer is closed, and one beyond the limit is answered 503 and closed at once, so that no caller takes the
descriptors that the rest of the process needs. Where TLS is spoken it is closed without an answer: a handshake would cost more than
what is refused. A request for which too many wait is answered 503 unread, and its connection closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import h11
import structlog
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvbridge.core.errors import CapacityError
from kvbridge.http.problems import PROBLEM_TYPE, problem_of
from kvbridge.http.turns import LONGEST_WAIT_S, MOST_WAITING, Line, Turns
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

ACCEPTS_PER_TURN = 128
"""After so many connections the rest of the loop gets its turn."""
ACCEPT_PAUSE_S = 1.0
"""A system that has nothing left for a new connection (descriptors, memory) is asked again after this."""
REQUEST_READ_BYTES = 65_536
"""Of the request of a caller that is turned away: closing while some of it is unread would reset the connection."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The configuration keys `http.max_request_s` and `http.max_connections`."""

    request_s: float
    """From the connection, or the first byte after an answer, to the last byte of a request. A TLS handshake before that
    may take as long, and so may the end of TLS after it. Of an answer some has to be taken within as much."""
    connections: int
    seldom: Seldom
    """Keeps lines about callers few: of that of the daemon."""


def _refusal(why: str) -> bytes:
    """Return the answer to a request that has not been read, whatever it asks."""
    body = problem_of(CapacityError(why), path="").model_dump_json(exclude_none=True).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: {PROBLEM_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"Retry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


TOO_MANY_WAIT = {
    line: _refusal(
        f"{MOST_WAITING} requests or more wait here to be read, the first of them for {wait_s:g} s already: this daemon is asked "
        "for more than it can answer; this request has not been read"
    )
    for line, wait_s in LONGEST_WAIT_S.items()
}
_HEAD_ENDS = re.compile(rb"\n\r?\n")
_FIRST_PRINTABLE = 0x21
"""No request begins with less: what speaks TLS to a port without it, for one. It waits where POSTs do, to be refused."""
HEAD_BYTES = 16_384
"""Of a request whose head has not ended: h11 refuses one that is longer."""


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with the limits of its class, and in its turn; see `bounded`."""

    limits: ConnectionLimits
    turns: Turns
    _request_timer: asyncio.TimerHandle | None = None
    _late = False
    _unread = b""
    """What has arrived and was not given to h11 yet."""
    _waits = False
    """Whether it waits for its turn."""
    _answer_timer: asyncio.TimerHandle | None = None
    """Runs while the caller has to take something of what is ready for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.ended = asyncio.Event()
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += data
        if len(self._unread) > HIGH_WATER_LIMIT:
            self.transport.pause_reading()
        self._seek_turn()

    def handle_events(self) -> None:
        """Seek a turn for the request that has arrived behind one that is answered; uvicorn calls this when an answer has ended."""
        self._seek_turn()

    def _seek_turn(self) -> None:
        """Wait for a turn with what has arrived, unless nobody can say yet what is asked, or an answer is to be sent first."""
        line = None if self._waits else self._line()
        if line is None:
            return
        self._waits = True
        if not self.turns.wait(self, line):
            self._waits = False
            self._turn_away(line)

    def _line(self) -> Line | None:
        if self.conn.their_state is h11.SEND_BODY:
            return Line.GOES_ON
        if self.conn.our_state is not h11.IDLE or self.conn.their_state is not h11.IDLE:
            return None
        # What h11 has in front of a request came in one segment with the request before.
        head = self.conn.trailing_data[0] + self._unread
        if not head:
            return None
        self._unset_keepalive_if_required()
        self._arm()
        if head[0] < _FIRST_PRINTABLE:
            return Line.CREATES
        if not _HEAD_ENDS.search(head):
            return Line.CREATES if len(head) > HEAD_BYTES else None
        return Line.CREATES if head.startswith(b"POST ") else Line.OTHER

    def take_turn(self) -> None:
        """Read what has arrived. Of a caller that has hung up meanwhile nothing is begun."""
        data, self._unread, self._waits = self._unread, b"", False
        if self.ended.is_set() or self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        try:
            if data:  # h11 takes none for the end of the connection
                self.conn.receive_data(data)
            super().handle_events()
        except Exception:
            self.transport.abort()
            raise
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._disarm()  # the request is here; how long its answer takes is the application's business
        elif self._late:
            self._too_slow()
        else:
            self._arm()
        self._expect_end()

    def _turn_away(self, line: Line) -> None:
        self._unread = b""
        if self.limits.seldom.admits("request_refused_unread"):
            log.warning("request_refused_unread", waiting=MOST_WAITING, waited_s=LONGEST_WAIT_S[line])
        self.transport.write(TOO_MANY_WAIT[line])
        self.transport.close()
        self._expect_end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._taken()
        super().connection_lost(exc)
        self.ended.set()

    # Whoever reads none of its answers would keep its connection for ever otherwise: an end waits for what is written to be sent.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taken()

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()
        self._expect_end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_end()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_end()

    def _expect_end(self) -> None:
        if self.transport.is_closing():
            self._expect_taken()

    def _expect_taken(self) -> None:
        if self._answer_timer is None and not self.ended.is_set():
            self._answer_timer = self.loop.call_later(self.limits.request_s, self._not_taken)

    def _taken(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def _not_taken(self) -> None:
        log.debug("connection_closed", reason="nothing of an answer was taken in time", limit="http.max_request_s")
        self.transport.abort()

    def _arm(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self.limits.request_s, self._too_slow)

    def _disarm(self) -> None:
        self._late = False
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _too_slow(self) -> None:
        self._request_timer = None
        self._late = True
        if self._waits:
            return  # it may be whole: that is seen when its turn comes
        log.debug("connection_closed", reason="no whole request in time", limit="http.max_request_s")
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return a protocol for uvicorn that keeps the limits; those of one server take turns. In the running loop."""
    own = {"limits": limits, "turns": Turns(asyncio.get_running_loop().call_soon)}
    return type("BoundedProtocol", (BoundedProtocol,), own)


class Acceptor:
    """Takes connections off a listening socket and serves them, each in a task of its own, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        build: Callable[[], BoundedProtocol],
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Begin in the running loop. Owns the listener from then on; `build` makes the protocol of one connection."""
        self.listener = listener
        self._build = build
        self._limits = limits
        self._tls = tls
        self._refusal = _refusal(
            f"{limits.connections} connections stand here, as many as may (http.max_connections); keep connections and use them "
            "again, or come back later"
        )
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept nothing more and cut connections whose handshake is not done; the others are left to uvicorn."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self.listener)
        self.listener.close()
        for task in self._connections:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("accept_failed", reason=str(error), open=len(self._connections), again_in_s=ACCEPT_PAUSE_S)
                self._loop.remove_reader(self.listener)
                self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            self._admit(connection)

    def _resume(self) -> None:
        self._loop.add_reader(self.listener, self._accept)

    def _admit(self, connection: socket.socket) -> None:
        if len(self._connections) >= self._limits.connections:
            if self._limits.seldom.admits("connection_refused"):
                log.warning("connection_refused", open=len(self._connections), limit="http.max_connections")
            self._refuse(connection)
            return
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # it has left, or has not sent anything yet
            if self._tls is None:
                connection.setblocking(False)
                connection.send(self._refusal)
                connection.recv(REQUEST_READ_BYTES)

    async def _serve(self, connection: socket.socket) -> None:
        limit_s = self._limits.request_s if self._tls else None
        try:
            _, protocol = await self._loop.connect_accepted_socket(
                self._build, connection, ssl=self._tls, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s
            )
        except OSError as error:  # also a handshake that is wrong, or late
            log.debug("connection_closed", reason=f"no connection was made: {error}", limit="http.max_request_s")
            return
        await protocol.ended.wait()
