"""Connections of control sockets: their limit, their deadline, and how their ends show."""

import asyncio
import contextlib
import gc
import resource
import socket as unix
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from kvbridge.control.gate import ConnectionLimit
from kvbridge.control.link import PeerSettings
from kvbridge.core.wire.messages import Heartbeat
from tests.helpers.held_ports import held_ports
from tests.integration.control.stage import CLIENT, WAIT_S, drained, poll

pytestmark = pytest.mark.asyncio


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def connect_and_be_cut(stage, endpoint):
    """Say nothing on a new connection, and return when the other side has closed it."""
    loop, caller = asyncio.get_running_loop(), stage.stack.enter_context(unix.socket())
    caller.setblocking(False)
    with contextlib.suppress(ConnectionError):
        await loop.sock_connect(caller, ("127.0.0.1", int(endpoint.rsplit(":", 1)[1])))
        while await loop.sock_recv(caller, 1_000):
            pass
    caller.close()


async def test_silent_connections_take_no_more_descriptors_than_the_limit(stage):
    """Even where the process has hardly more than that: what cuts them needs no descriptor that it does not hold already."""
    _, at_server, endpoint = stage.server(settings=PeerSettings(max_connections=10, handshake_s=60))
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    stage.stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
    gc.collect()  # what earlier tests have left is not closed meanwhile
    before = open_descriptors()
    silent = set()
    async with asyncio.timeout(WAIT_S):
        for _ in range(10):  # no more at a time than the kernel lets wait for us (ZeroMQ's backlog is 100)
            silent |= {asyncio.create_task(connect_and_be_cut(stage, endpoint)) for _ in range(30)}
            await asyncio.sleep(0)  # each has its own descriptor now, and the server may have few more
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60, limit[1]))
            while len(silent) > 9:  # the client has one of the ten
                _, silent = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        while open_descriptors() != before + 2 * 9:  # noqa: ASYNC110 - both ends are in this process
            await asyncio.sleep(0.01)
    assert at_server.refused.count("too_many_connections") == 291
    client.send(drained(2))
    await at_server.until(lambda: at_server.rooms == [1, 2])
    for task in silent:
        task.cancel()


async def test_a_handshake_has_a_deadline(stage):
    _, at_server, endpoint = stage.server(settings=PeerSettings(max_connections=1, handshake_s=0.2))
    async with asyncio.timeout(WAIT_S):
        await connect_and_be_cut(stage, endpoint)
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    assert "handshake" in at_server.refused


async def test_a_side_that_has_ended_shows_in_the_connection(stage):
    server, at_server, endpoint = stage.server()
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await poll(lambda: client.link.peer)
    assert (server.link(CLIENT).cut_s, client.link.cut_s) == (0.0, 0.0)
    client.close()
    await poll(lambda: server.link(CLIENT).cut_s, lambda: server.send(CLIENT, Heartbeat()))
    again, at_again = stage.client(endpoint, "a" * 16)
    again.send(drained(2))
    await poll(lambda: again.link.peer)
    assert at_server.rooms == [1, 2]
    server.close()
    await at_again.until(lambda: at_again.cuts)  # without anything being sent
    assert again.link.cut_s


async def test_an_address_where_nobody_listens_shows_too_and_may_be_listened_at_later(stage):
    with held_ports(1) as (port,):
        endpoint = f"tcp://127.0.0.1:{port}"
        client, at_client = stage.client(endpoint)
        client.send(drained(1))
        await at_client.until(lambda: at_client.cuts)
        assert client.link.cut_s
        assert not client.link.peer
        _, at_server, _ = stage.server(endpoint=endpoint)
        await at_server.until(lambda: at_server.rooms == [1])
        assert client.link.cut_s == 0.0
        assert at_client.cuts == 1


async def test_a_connection_on_which_nobody_answers_is_not_one_that_is_gone(stage):
    with unix.create_server(("127.0.0.1", 0)) as silent:
        client, at_client = stage.client(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        client.send(drained(1))
        connection = await asyncio.to_thread(accepted, silent)
        assert connection.recv(1) == b"\xff", "ZeroMQ's greeting"
        connection.close()  # as a peer with other keys does
        again = await asyncio.to_thread(accepted, silent)
        again.close()
        assert (client.link.cut_s, at_client.cuts) == (0.0, 0)


def accepted(listener):
    listener.settimeout(WAIT_S)
    connection, _ = listener.accept()
    connection.settimeout(WAIT_S)
    return connection


async def test_a_connection_that_is_back_is_known_at_once_on_both_sides(stage):
    """A heartbeat may be long in coming; the side that connects says that it is there."""
    server, at_server, endpoint = stage.server()
    client, at_client = stage.client(endpoint)
    client.send(drained(1))
    await poll(lambda: client.link.peer)
    client._socket._raw.disconnect(endpoint)
    await poll(lambda: client.link.cut_s, lambda: client.send(Heartbeat()))
    await poll(lambda: server.link(CLIENT).cut_s, lambda: server.send(CLIENT, Heartbeat()))
    client._socket._raw.connect(endpoint)
    await poll(lambda: not server.link(CLIENT).cut_s and not client.link.cut_s)
    assert (at_server.resets, at_client.resets) == ([], [])


ACCEPTED, DISCONNECTED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


async def test_a_descriptor_that_became_another_connection_is_left_alone():
    cut, accepted_event, never = [], int(zmq.EVENT_ACCEPTED), 1 << 20  # a descriptor that no process has
    ours, other = unix.create_server(("127.0.0.1", 0)), unix.create_server(("127.0.0.1", 0))
    limit = ConnectionLimit(1, lambda: cut.append(True))
    limit.bound(f"tcp://127.0.0.1:{ours.getsockname()[1]}")
    stranger = unix.create_connection(other.getsockname(), timeout=WAIT_S)
    with closing(ours), closing(other), closing(limit), closing(stranger), closing(other.accept()[0]) as connection:
        limit.on_event(accepted_event, never)
        limit.on_event(accepted_event, connection.fileno())
        assert cut == [True]
        connection.sendall(b"x")
        assert stranger.recv(1) == b"x"
