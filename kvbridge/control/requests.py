"""Requests and answers between commands of two hosts. A client also finds out whether a control socket accepts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

import zmq

from kvbridge.control.keys import CurveKeys, Gate
from kvbridge.control.peers import PeerIdentity
from kvbridge.control.sockets import (
    CONNECT_FAILED,
    HANDSHAKE_FAILED,
    HANDSHAKE_FAILED_AUTH,
    HANDSHAKE_SUCCEEDED,
    Authenticator,
    LoopSocket,
    Parts,
    SocketContext,
    bind,
    read_event,
    show_keys,
)
from kvbridge.core.errors import DeadlineError, PeerError, UnauthorizedError
from kvbridge.core.process import Closing

_MAX_BYTES = 2 << 20
"""The most bytes of one request or answer; an endpoint has at most 1 MiB."""
_CONNECTED = int(zmq.Event.CONNECTED)


class RequestServer(Closing):
    """Answers requests one after another, in the running loop; `answer` must not raise."""

    def __init__(
        self, identity: PeerIdentity, endpoint: str, answer: Callable[[bytes], bytes], on_denied: Callable[[str], None]
    ) -> None:
        """Listen; `endpoint` is the real one afterwards. Raises ConflictError, ConfigError, as `PeerServer` does."""
        identity.require_keys(endpoint, "listen on")
        self._answer = answer
        with ExitStack() as opened:
            context = SocketContext()
            opened.callback(context.close)
            raw = context.open(zmq.REP)
            raw.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
            if identity.keys is not None:
                opened.callback(Authenticator(context, Gate(identity.keys), on_denied).close)
                show_keys(raw, identity.keys)
            self.endpoint = bind(raw, endpoint)
            self._socket = LoopSocket(raw, self._on_parts)
            opened.callback(self._socket.close)
            self._closing = opened.pop_all()

    def close(self) -> None:
        """Stop listening; harmless when closed."""
        self._closing.close()

    def _on_parts(self, parts: Parts) -> None:
        self._socket.send([self._answer(parts[0].bytes)])


class RequestClient(Closing):
    """Sends requests to one server, from code without an event loop. A request that is not answered in time ends it."""

    def __init__(self, endpoint: str, *, keys: CurveKeys | None, server_key: str, timeout_s: float) -> None:
        """Connect and shake hands within `timeout_s`, unnoticed by the daemon. An empty `server_key`: that of our own pair.

        Raises PeerError when nobody answers the connection, UnauthorizedError when the handshake is refused, DeadlineError when the
        handshake does not end.
        """
        self._name = endpoint
        self._timeout_s = timeout_s
        self._closing = ExitStack()
        context = SocketContext()
        self._closing.callback(context.close)
        self._socket = context.open(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if keys is not None:
            show_keys(self._socket, keys, server_key or keys.public)
        try:
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect; harmless when closed."""
        self._closing.close()

    def ask(self, question: bytes) -> bytes:
        """Return the answer. Raises DeadlineError when none comes in time; the client is of no use then."""
        self._socket.send(question)
        if not self._socket.poll(math.ceil(self._timeout_s * 1e3), zmq.POLLIN):
            raise DeadlineError(f"{self._name} did not answer within {self._timeout_s:g} s")
        return self._socket.recv()

    def _shake_hands(self) -> None:
        endpoint, timeout_s = self._name, self._timeout_s
        events = _CONNECTED | CONNECT_FAILED | HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED
        monitor = self._socket.get_monitor_socket(events)
        connected = False
        try:
            self._socket.connect(endpoint)
            until_s = monotonic() + timeout_s
            while (left_s := until_s - monotonic()) > 0 and monitor.poll(math.ceil(left_s * 1e3)):
                event, _ = read_event(monitor.recv_multipart()[0])
                if event == HANDSHAKE_SUCCEEDED:
                    return
                if event == HANDSHAKE_FAILED_AUTH:
                    raise UnauthorizedError(
                        f"{endpoint} does not allow our key: add it to that node's list of allowed keys"
                    )
                if event & HANDSHAKE_FAILED:
                    raise PeerError(
                        f"{endpoint} refuses the handshake: one side has no keys, or other ones than expected"
                    )
                if event == CONNECT_FAILED:
                    raise PeerError(f"{endpoint} refuses connections: nobody listens there")
                connected = True
        except zmq.ZMQError as error:
            raise PeerError(f"{endpoint} cannot be connected to: {error}") from error
        finally:
            self._socket.disable_monitor()
            monitor.close()
        if connected:
            raise DeadlineError(
                f"{endpoint} accepts connections and does not end the handshake within {timeout_s:g} s: it is no control "
                "socket, hangs, or its public key is another one"
            )
        raise PeerError(
            f"{endpoint} accepts no connection within {timeout_s:g} s: a firewall drops them, or the host is down"
        )
