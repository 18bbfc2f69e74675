"""Calls that wait for a socket, and their end; the library itself is the contract suite's matter."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvbridge.core.errors import TransportError
from kvbridge.transport.mooncake import library
from kvbridge.transport.mooncake.library import PeerCall
from kvbridge.transport.threads import Call

LIMIT_S = 10.0


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


class Asker:
    """Asks as the library does: connects, and waits for an answer for as long as it takes."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port = port
        self.host = host
        self.waiting = threading.Event()
        self.returned = threading.Event()

    def __call__(self) -> int:
        answer = b""
        with socket.create_connection((self.host, self.port)) as connection, contextlib.suppress(OSError):
            self.waiting.set()
            answer = connection.recv(1)
        self.returned.set()
        return answer[0] if answer else -1


def ask(asker: Asker, timeout_s: float, host: str = "127.0.0.1") -> tuple[PeerCall, Call[int]]:
    asked = PeerCall(f"{host}:{asker.port}")
    function = partial(asked.ask, asker, timeout_s=timeout_s, name="ask", late="it gave no answer")
    call = Call(function, name="ask", timeout_s=60.0, late="", clock=time.monotonic, given_up=asked.cancel)
    assert call.poll() is None  # and so it begins
    return asked, call


def answer(call: Call[int]) -> int:
    ends_at_s = time.monotonic() + LIMIT_S
    while (found := call.poll()) is None:
        assert time.monotonic() < ends_at_s
    return found


def test_a_peer_that_answers(silent: socket.socket) -> None:
    asker = Asker(silent.getsockname()[1])
    _, pending = ask(asker, LIMIT_S)
    connection, _ = silent.accept()
    with connection:
        assert pending.poll() is None
        connection.sendall(b"\x05")
        assert answer(pending) == 5


def test_a_peer_that_does_not_answer_is_given_its_time_and_no_more(silent: socket.socket) -> None:
    """The call itself has returned then, and its threads with it."""
    before = threading.active_count()
    asker = Asker(silent.getsockname()[1])
    begun_s = time.monotonic()
    _, pending = ask(asker, 0.2)
    with pytest.raises(TransportError, match="it gave no answer"):
        answer(pending)
    assert time.monotonic() - begun_s >= 0.2
    assert asker.returned.is_set()
    while threading.active_count() > before:
        assert time.monotonic() < begun_s + LIMIT_S


def test_another_host_with_a_process_at_the_same_port_is_left_alone(silent: socket.socket) -> None:
    """Ports are drawn from two thousand, so of a few dozen peers two share one."""
    asker = Asker(silent.getsockname()[1])
    _, pending = ask(asker, 0.2)
    assert asker.waiting.wait(LIMIT_S)  # sockets that are there before the call are left alone anyway
    with socket.create_server(("127.0.0.2", asker.port)) as another, contextlib.ExitStack() as stack:
        mine = stack.enter_context(socket.create_connection(another.getsockname()))
        theirs, _ = another.accept()
        stack.enter_context(theirs)
        with pytest.raises(TransportError, match="it gave no answer"):
            answer(pending)
        theirs.sendall(b"x")
        assert mine.recv(1) == b"x"


@pytest.mark.parametrize(("name", "dialled"), [("localhost", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1")])
def test_a_peer_is_known_by_its_addresses_however_it_is_named(silent: socket.socket, name: str, dialled: str) -> None:
    asker = Asker(silent.getsockname()[1], dialled)
    _, pending = ask(asker, 0.2, host=name)
    with pytest.raises(TransportError, match="it gave no answer"):
        answer(pending)
    assert asker.returned.is_set()


@pytest.mark.parametrize("how", ["cancelled", "ended"])
def test_a_call_that_nobody_needs_ends_at_once(silent: socket.socket, how: str) -> None:
    asker = Asker(silent.getsockname()[1])
    call, pending = ask(asker, 60.0)
    assert pending.poll() is None
    assert asker.waiting.wait(LIMIT_S)
    if how == "cancelled":
        pending.cancel()
    else:
        assert call.end(LIMIT_S)
    assert asker.returned.wait(LIMIT_S)


def refuse_to_list() -> list[tuple[str, int]]:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_call_is_given_up_and_cut_off_later_when_no_descriptor_is_left(silent, monkeypatch) -> None:
    asker = Asker(silent.getsockname()[1])
    call, pending = ask(asker, 0.2)
    connection, _ = silent.accept()
    with connection:
        assert asker.waiting.wait(LIMIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(library, "_sockets", refuse_to_list)
            pending.cancel()
            assert not call.end(0.0)
        assert asker.returned.wait(LIMIT_S)
