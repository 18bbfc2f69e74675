"""Unix stream sockets between the daemon of a node and its rank workers and engines.

A connection is a client. Memory is handed over on a connection, so the end of the connection is the end of the client. A frame is
one byte of protocol version, three of length, and a message. Two frames carry no message: the daemon's first frame tells its
incarnation, and an empty frame tells a client that the daemon has given it up. The daemon trusts a client that can connect. A
client trusts a runtime directory that belongs to the client's user or to the named one.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import os
import select
import socket as unix
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvbridge.control.unix_sockets import PeerProcess, listen_at, remove_socket, require_private_directory
from kvbridge.core.addresses import check_ipc_path
from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, NotFoundError, NotReadyError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.wire.codec import FrameError, FrameFault, MessageCodec
from kvbridge.core.wire.messages import PROTOCOL_VERSION

InboundT = TypeVar("InboundT", bound=FrozenModel)
OutboundT = TypeVar("OutboundT", bound=FrozenModel)

MAX_UNSENT_BYTES = 16 << 20
"""Frames that wait in this process for an end that does not read, beside those in the kernel."""
_HEAD_BYTES = 4
_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 18
"""One call hands at most this much to the kernel."""
_SEND_BUFFER_BYTES = 4 << 20
"""The kernel takes so much of a burst at once, and the burst arrives though the client makes no further call. By default the kernel
takes about 280 small messages, each of which costs 768 bytes. It grants up to twice `net.core.wmem_max`, at least 550 messages."""
_GIVEN_UP = b""
_DAEMON_ENDED = "the daemon has ended or closed the connection"
_CLOSED = "this client is closed"
_CONNECT_AGAIN_S = 0.02
_LAST_FRAMES_S = 0.2
"""How long a client that is closed waits for its last frames to leave."""

# These calls keep the interpreter's lock, unlike Python's own. They never wait. A thread that lets the lock go beside one that
# computes, as in an engine's process, gets the lock back up to 5 ms later.
_libc = ctypes.PyDLL(None, use_errno=True)
_recv, _send = _libc.recv, _libc.send
_recv.argtypes = _send.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_recv.restype = _send.restype = ctypes.c_ssize_t
_SEND_FLAGS = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL


def framed(body: bytes) -> bytes:
    """Return the frame of an encoded message."""
    return (PROTOCOL_VERSION << 24 | len(body)).to_bytes(_HEAD_BYTES, "big") + body


def _take_frames(received: bytearray, most_bytes: int) -> Iterator[bytes]:
    """Yield and remove the bodies of whole frames. Raises FrameError for a frame after which nothing can be read."""
    while len(received) >= _HEAD_BYTES:
        version, end = received[0], _HEAD_BYTES + int.from_bytes(received[1:_HEAD_BYTES], "big")
        if version != PROTOCOL_VERSION:
            text = f"we speak protocol version {PROTOCOL_VERSION}, the sender {version}; upgrade the older side"
            raise FrameError(FrameFault.VERSION, text)
        if end - _HEAD_BYTES > most_bytes:
            text = f"frame of {end - _HEAD_BYTES} bytes, at most {most_bytes} are taken"
            raise FrameError(FrameFault.OVERSIZED, text)
        if len(received) < end:
            return
        body = bytes(received[_HEAD_BYTES:end])
        del received[:end]
        yield body


class _Connection(asyncio.Protocol):
    """A client of a server."""

    transport: asyncio.Transport
    process: PeerProcess
    name: str

    def __init__(self, server: LocalServer[Any, Any]) -> None:
        self._server = server
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.process = PeerProcess.of_connection(transport.get_extra_info("socket"))
        self._server.joined(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            for body in _take_frames(self._received, self._server.inbound.max_frame_bytes):
                self._server.heard(self, body)
                if self.name not in self._server.clients:  # the message led to its end
                    return
        except FrameError as error:
            self._server.on_refused(error.fault, f"{self.name}: {error}")
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:  # a write found it; the last messages of the client are still unread
            with suppress(OSError):
                while data := os.read(self.transport.get_extra_info("socket").fileno(), _READ_BYTES):
                    self.data_received(data)
        self._server.lost(self)


class LocalServer(Generic[InboundT, OutboundT]):
    """The daemon's end. Built and used in one running loop; close it.

    A client is named after the socket and the client's process, as `engine-123.4`. The loop runs the callbacks one after another;
    none may block.
    """

    def __init__(  # noqa: PLR0913 - the parts of a conversation
        self,
        incarnation: str,
        path: Path,
        inbound: MessageCodec[InboundT],
        outbound: MessageCodec[OutboundT],
        *,
        on_message: Callable[[str, InboundT], None],
        on_gone: Callable[[str, PeerProcess], None],
        on_refused: Callable[[str, str], None],
        to_group: bool = False,
    ) -> None:
        """Listen on `path`, in a directory that `prepare_runtime_directory` has prepared. Raises as `listen_at`.

        `on_message(client, message)` gets messages in order; a BridgeError refuses the message. `on_gone(client, process)`: the
        connection has ended, or the client broke the protocol. Only `process` knows whether the process has ended as well; it is
        closed after the call, unless the call uses `when_ended`. `on_refused(kind, detail)`: a frame or a message was refused.
        `to_group`: the group of the directory may connect, too.
        """
        self._greeting = framed(incarnation.encode())
        self._path = path
        self.inbound, self._outbound = inbound, outbound
        self._on_message, self._on_gone, self.on_refused = on_message, on_gone, on_refused
        self.clients: dict[str, _Connection] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._socket = listen_at(path, to_group=to_group)
        self._inode = path.stat().st_ino
        self._server: asyncio.Server | None = None
        self._starting = self._loop.create_task(self._accept())

    def send(self, client: str, message: OutboundT) -> None:
        """Send to a client.

        Raises NotFoundError for a client that is gone, CapacityError for one that has left megabytes unread, InvalidInputError for
        a message that does not fit into a frame.
        """
        transport, frame = self._known(client).transport, framed(self._outbound.encode_body(message))
        if transport.get_write_buffer_size() + len(frame) > MAX_UNSENT_BYTES:
            raise CapacityError(f"local client '{client}' does not read its messages, or is just going; it may hang")
        transport.write(frame)

    def process(self, client: str) -> PeerProcess:
        """Return the process of a client. Raises NotFoundError when the client is gone."""
        return self._known(client).process

    def drop(self, client: str) -> None:
        """Give a client up and tell it, without `on_gone`. Harmless for a client that is gone."""
        known = self.clients.pop(client, None)
        if known is not None:
            known.transport.write(framed(_GIVEN_UP))
            known.transport.close()
            known.process.close()

    def close(self) -> None:
        """Stop listening and end every connection, without `on_gone`. Harmless when closed."""
        if self._socket.fileno() >= 0:
            self._starting.cancel()
            if self._server is not None:
                self._server.close()
            self._socket.close()
            remove_socket(self._path, self._inode)
        for known in self.clients.values():
            known.transport.close()
            known.process.close()
        self.clients.clear()

    # ------------------------------------------------------------------ connections call these

    def joined(self, client: _Connection) -> None:
        """A client has connected."""
        client.name = f"{self._path.stem}-{client.process.pid}.{next(self._numbers)}"
        self.clients[client.name] = client
        client.transport.write(self._greeting)

    def heard(self, client: _Connection, body: bytes) -> None:
        """A client has sent a message."""
        message: InboundT | None = None
        try:
            message = self.inbound.decode_body(body)
            self._on_message(client.name, message)
        except FrameError as error:
            self.on_refused(error.fault, str(error))
        except BridgeError as error:
            self.on_refused(error.code, f"{type(message).__name__} of {client.name}: {error}")
        except Exception as error:  # noqa: BLE001 - a defect costs one message, not those behind it
            self._loop.call_exception_handler({"message": f"a message of {client.name}", "exception": error})

    def lost(self, client: _Connection) -> None:
        """A connection has ended."""
        if self.clients.pop(client.name, None) is None:
            return
        try:
            self._on_gone(client.name, client.process)
        finally:
            client.process.close()

    async def _accept(self) -> None:
        self._server = await self._loop.create_unix_server(lambda: _Connection(self), sock=self._socket)

    def _known(self, client: str) -> _Connection:
        try:
            return self.clients[client]
        except KeyError:
            raise NotFoundError(f"local client '{client}' is not joined; its process ended or never started") from None


class LocalClient(Generic[InboundT, OutboundT]):
    """A worker's or an engine's end, without asyncio; used by one thread.

    Every call raises PeerError once the daemon is gone; the caller makes a new client then.
    """

    def __init__(
        self,
        path: Path,
        inbound: MessageCodec[InboundT],
        outbound: MessageCodec[OutboundT],
        *,
        daemon_user: int | None = None,
    ) -> None:
        """Connect if the daemon is there; otherwise `send` waits for the daemon.

        `daemon_user`: the number of the daemon's user (default: this process's). Raises ConfigError for an unfit path, and for a
        runtime directory of another user or one that others can write.
        """
        check_ipc_path(str(path))
        self._path = path
        self._inbound = inbound
        self._outbound = outbound
        self._daemon_user = daemon_user
        self._socket: unix.socket | None = None
        self._unsent = bytearray()
        self._chunk = ctypes.create_string_buffer(_READ_BYTES)
        self._received = bytearray()
        self._bodies: deque[bytes] = deque()
        self._gone = ""
        self.daemon = ""
        """The incarnation of the daemon; empty before the daemon's first frame."""
        self._connect()

    @property
    def daemon_ended(self) -> bool:
        """Whether the last call found that the daemon has ended. False: the daemon has only given this client up."""
        return self._gone == _DAEMON_ENDED

    def send(self, message: OutboundT, timeout_s: float = 1.0) -> None:
        """Hand a message over, waiting at most `timeout_s` for the connection, or for a daemon that does not read.

        The next call sends the bytes that the kernel does not take now. Raises NotReadyError when the message was not sent in time,
        PeerError once the daemon is gone, InvalidInputError for a message that is too large.
        """
        frame = framed(self._outbound.encode_body(message))
        deadline_s = time.monotonic() + timeout_s
        if not self._reach(deadline_s):
            raise NotReadyError(f"could not send to {self._path} within {timeout_s} s: no daemon answers there yet")
        self._flush()
        while len(self._unsent) + len(frame) > MAX_UNSENT_BYTES:
            if not self._wait(select.POLLOUT, deadline_s):
                why = "the daemon hangs or has ended"
                raise NotReadyError(f"could not send to {self._path} within {timeout_s} s: {why}")
            self._flush()
        self._unsent += frame
        self._flush()

    def receive(self, timeout_s: float) -> InboundT | None:
        """Return the next message, or None when none came within `timeout_s` (0: do not wait). Unknown messages are dropped.

        Raises PeerError once the daemon is gone and its last message was read.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self._reach(deadline_s):
            return None
        while True:
            while self._bodies:
                with suppress(FrameError):  # a message of a later release
                    return self._inbound.decode_body(self._bodies.popleft())
            self._flush()
            events = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
            if not self._read() and not self._wait(events, deadline_s):
                return None

    def close(self) -> None:
        """Disconnect, after at most 0.2 s for the last messages. Harmless when closed."""
        deadline_s = time.monotonic() + _LAST_FRAMES_S
        while self._unsent and not self._gone and self._wait(select.POLLOUT, deadline_s):
            self._send_waiting()
        if self._socket is not None:
            self._socket.close()
        self._gone = _CLOSED

    def _reach(self, deadline_s: float) -> bool:
        """Return whether there is or was a connection; try until the deadline. Raises ConflictError after `close`."""
        if self._gone == _CLOSED:
            raise ConflictError(f"the local client of {self._path} is not connected: {_CLOSED}")
        while self._socket is None and not self._connect():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_CONNECT_AGAIN_S)
        return True

    def _connect(self) -> bool:
        """Connect if a daemon listens, and only where nobody else can have put a socket."""
        if not require_private_directory(self._path.parent, self._daemon_user):
            return False
        socket = unix.socket(unix.AF_UNIX, unix.SOCK_STREAM)
        socket.setsockopt(unix.SOL_SOCKET, unix.SO_SNDBUF, _SEND_BUFFER_BYTES)
        socket.setblocking(False)
        try:
            socket.connect(str(self._path))
        except OSError:  # nobody listens there, or too many wait to be accepted
            socket.close()
            return False
        self._socket = socket
        return True

    def _wait(self, events: int, deadline_s: float) -> bool:
        """Wait until the socket is ready for one of `events`; return whether it is."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(max(1, int(left_s * 1_000))))

    def _flush(self) -> None:
        """Send waiting bytes as far as the kernel takes them. Raises PeerError once the daemon is gone."""
        if self._unsent and not self._gone:
            self._send_waiting()
        if self._gone:
            raise PeerError(f"the daemon at {self._path}: {self._gone}; connect anew")

    def _send_waiting(self) -> None:
        assert self._socket is not None
        data = bytes(memoryview(self._unsent)[:_WRITE_BYTES])
        sent = _send(self._socket.fileno(), data, len(data), _SEND_FLAGS)
        if sent < 0 and ctypes.get_errno() != errno.EAGAIN:
            while not self._gone:  # the connection has ended, and its last words are there
                self._read()
        del self._unsent[: max(0, sent)]

    def _read(self) -> bool:
        """Take what has arrived; return whether something has, be it the end of the connection."""
        assert self._socket is not None
        count = _recv(self._socket.fileno(), self._chunk, _READ_BYTES, unix.MSG_DONTWAIT)
        if count < 0 and ctypes.get_errno() == errno.EAGAIN:
            return False
        if count <= 0:
            self._gone = self._gone or _DAEMON_ENDED
            return True
        self._received += memoryview(self._chunk)[:count]
        try:
            for body in _take_frames(self._received, self._inbound.max_frame_bytes):
                self._take(body)
        except FrameError as error:
            self._gone = str(error)
        return True

    def _take(self, body: bytes) -> None:
        if not self.daemon:
            self.daemon = body.decode(errors="replace")
        elif body == _GIVEN_UP:
            self._gone = "the daemon does not know this client (any more)"
        else:
            self._bodies.append(body)
