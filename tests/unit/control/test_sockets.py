"""What a look at a socket costs whoever shares the interpreter with it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import zmq

from kvbridge.control.sockets import NOBLOCK, SocketContext, frames_wait

LIMIT_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two connected sockets."""
    context = SocketContext()
    try:
        ours, theirs = context.open(zmq.PAIR), context.open(zmq.PAIR)
        ours.bind("inproc://looks")
        theirs.connect("inproc://looks")
        yield ours, theirs
    finally:
        context.close()


@pytest.fixture
def lock_is_kept() -> Iterator[None]:
    """No thread takes the interpreter's lock from one that computes; it is had by whom it is given."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(LIMIT_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


def test_frames_wait_until_they_are_read(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    ours, theirs = pair
    assert not frames_wait(ours)
    theirs.send(b"one")
    theirs.send(b"two")
    assert frames_wait(ours)
    assert ours.recv(NOBLOCK) == b"one"
    assert frames_wait(ours)
    assert ours.recv(NOBLOCK) == b"two"
    assert not frames_wait(ours)


def test_a_look_does_not_let_another_thread_compute(
    pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], lock_is_kept: None
) -> None:
    ours, _ = pair
    begin, ran = threading.Event(), []
    other = threading.Thread(target=lambda: (begin.wait(LIMIT_S), ran.append(True)))
    other.start()
    try:
        begin.set()
        for _ in range(10_000):
            frames_wait(ours)
        assert not ran, "a look gave the interpreter's lock away, and an engine has it back when others have computed"
    finally:
        other.join(LIMIT_S)
    assert ran
