"""How many connections a listening socket may hold: which of them count, and which one is cut."""

import socket
from contextlib import closing

import pytest
import zmq

from kvbridge.control.connections import ConnectionLimit

ACCEPTED, DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


@pytest.fixture
def connected():
    """A connection as a server sees it, and its other end."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        client = socket.create_connection(server.getsockname())
        with closing(client), closing(server.accept()[0]) as accepted:
            client.settimeout(20)
            yield accepted, client


@pytest.fixture
def limited(connected):
    """A limit of one connection to the address of `connected`, and how often it has cut one."""
    cut = []
    limit = ConnectionLimit(1, lambda: cut.append(True))
    limit.bound(f"tcp://127.0.0.1:{connected[0].getsockname()[1]}")
    with closing(limit):
        yield limit, cut


NEVER = 1 << 20
"""A descriptor that no process has."""


def test_the_connection_beyond_the_limit_is_cut(connected, limited):
    (accepted, client), (limit, cut) = connected, limited
    limit.on_event(ACCEPTED, NEVER)
    limit.on_event(ACCEPTED, accepted.fileno())
    assert cut == [True]
    assert client.recv(1) == b""


def test_a_connection_that_ended_does_not_count(connected, limited):
    (accepted, _), (limit, cut) = connected, limited
    limit.on_event(ACCEPTED, NEVER)
    limit.on_event(DISCONNECTED, NEVER)
    limit.on_event(ACCEPTED, accepted.fileno())
    assert not cut


def test_a_descriptor_that_became_another_connection_is_left_alone(connected, limited):
    limit, cut = limited
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        stranger = socket.create_connection(other.getsockname())
        with closing(stranger), closing(other.accept()[0]) as accepted:
            limit.on_event(ACCEPTED, NEVER)
            limit.on_event(ACCEPTED, accepted.fileno())
            assert cut == [True]
            accepted.sendall(b"x")
            stranger.settimeout(20)
            assert stranger.recv(1) == b"x"
