"""Every backend: a peer that does not answer while it is being connected holds no other peer's transfers up."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbridge.config.transports import TransportSettings
from kvbridge.core.errors import TransportError
from kvbridge.transport import create_transport
from kvbridge.transport.base import Endpoint, Peer, TransferState
from kvbridge.transport.mooncake.transport import MooncakeEndpoint
from kvbridge.transport.threads import Call
from tests.contract.conftest import BUFFER_BYTES, new_pair
from tests.contract.harness import BACKENDS, MOONCAKE, Backend, Pair, PeerProcess, wait

LEFT_OUT = ("faulty",)
"""It connects as what it wraps."""
LIMIT_S = 20.0
METADATA_MESSAGE = 1
"""Mooncake's number for an answer with a description."""


@dataclass(frozen=True)
class Outcome:
    """An attempt to connect, and the transfers to another peer meanwhile."""

    peer: Peer | None
    error: str
    took_s: float
    longest_gap_s: float
    """Between the ends of two of these transfers."""
    transfers: int


def connect_and_write(connection: Call[Peer], pair: Pair) -> Outcome:
    """Do what a rank worker does: poll the connection, and write to the peer that is there, again and again."""
    begun_s = last_s = time.monotonic()
    longest_s, count, peer, error = 0.0, 0, None, ""
    while peer is None and not error:
        assert time.monotonic() < begun_s + LIMIT_S
        try:
            peer = connection.poll()
        except TransportError as refusal:
            error = str(refusal)
        status = wait(pair.transport.submit(pair.peer, pair.blocks(4_096, 4), deadline_s=LIMIT_S))
        assert status.state is TransferState.DONE, status
        now_s = time.monotonic()
        longest_s, last_s, count = max(longest_s, now_s - last_s), now_s, count + 1
    return Outcome(peer, error, time.monotonic() - begun_s, longest_s, count)


def test_a_silent_peer_holds_no_other_up(backend: Backend, owned: Pair, shm: Path) -> None:
    with PeerProcess(backend, shm / "silent", BUFFER_BYTES) as silent:
        endpoint = silent.endpoint
        silent.stop()  # its kernel accepts connections, and nobody answers
        found = connect_and_write(owned.transport.connect(endpoint), owned)
        print(f"{backend.label}: {found}")
        if backend.outlives_peer:  # it need not ask the peer
            assert found.peer is not None
            return
        assert found.peer is None
        assert "answer" in found.error
        assert found.longest_gap_s < found.took_s / 2
        assert found.transfers > 20


def threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_attempts_to_reach_a_silent_peer_leave_nothing_behind(backend: Backend, owned: Pair, shm: Path) -> None:
    """Neither threads nor descriptors, however often it is tried, given up or waited for."""
    with PeerProcess(backend, shm / "silent", BUFFER_BYTES) as silent:
        endpoint = silent.endpoint
        silent.stop()
        for number in range(4):
            connection = owned.transport.connect(endpoint)
            if number % 2:
                found = connect_and_write(connection, owned)
                if found.peer is not None:
                    owned.transport.disconnect(found.peer)
                del found
            elif (peer := connection.poll()) is None:
                connection.cancel()
            else:  # it was there at once
                owned.transport.disconnect(peer)
            if number == 1:
                before = threads_and_descriptors()
        ends_at_s = time.monotonic() + LIMIT_S
        while (left := threads_and_descriptors()) > before:
            assert time.monotonic() < ends_at_s, (before, left)
    assert owned.move(owned.blocks(4_096, 8)).state is TransferState.DONE


class AnsweringOnce:
    """Stands before a mooncake peer's port: lets the first connection, which is the probe, through; to others it says `instead`."""

    def __init__(self, session: str, *, instead: bytes = b"") -> None:
        self._instead = instead
        host, port = session.rsplit(":", 1)
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self._targets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._serve)

    def close(self) -> None:
        for open_ in (self._listener, *self.connections, *self._targets):
            with contextlib.suppress(OSError):  # wakes whoever waits on it; it may have ended by itself
                open_.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for open_ in (self._listener, *self.connections, *self._targets):
            open_.close()

    def _start(self, work: Callable[..., None], *given: socket.socket) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            if len(self.connections) > 1:
                connection.sendall(self._instead)
            else:
                target = socket.create_connection(self._target)
                self._targets.append(target)
                for pair in ((connection, target), (target, connection)):
                    self._start(_pass_on, *pair)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one of them has ended
        while data := source.recv(4_096):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def meet_before(shm: Path, *, instead: bytes = b"") -> Outcome:
    """Connect to a mooncake peer that answers a probe and then says `instead`, while another is written to."""
    settings = TransportSettings(mooncake=MOONCAKE.model_copy(update={"metadata_timeout_s": 0.5}))
    transport = create_transport("mooncake", settings)
    try:
        with PeerProcess(BACKENDS["mooncake"], shm / "peer", BUFFER_BYTES) as process:
            pair = new_pair(BACKENDS["mooncake"], transport, shm, process)
            content = MooncakeEndpoint.model_validate_json(pair.process.endpoint.data)
            before = AnsweringOnce(content.session, instead=instead)
            false = content.model_copy(update={"session": before.session}).model_dump_json().encode()
            found = connect_and_write(transport.connect(Endpoint(transport="mooncake", data=false)), pair)
            print(found)
            assert len(before.connections) == 2
            before.close()
            assert pair.move(pair.blocks(4_096, 8)).state is TransferState.DONE
    finally:
        begun_s = time.monotonic()
        transport.close()
        assert time.monotonic() - begun_s < LIMIT_S
    return found


def test_a_mooncake_peer_that_answers_and_does_not_say_what_it_has(shm: Path) -> None:
    """The library lets nobody write meanwhile, so it is given less time; left alone it would take 60 s."""
    found = meet_before(shm)
    assert "did not describe its memory" in found.error
    assert found.longest_gap_s < 30.0


@pytest.mark.parametrize("body", [b"[" * 10_000, b"null"], ids=repr)
def test_a_mooncake_peer_whose_description_cannot_be_read(shm: Path, body: bytes) -> None:
    """The library's parser throws over the first one."""
    found = meet_before(shm, instead=struct.pack("<QB", len(body) + 1, METADATA_MESSAGE) + body)
    assert found.peer is None
    assert "please report it" not in found.error
