"""Control sockets of two daemons over real TCP: delivery, refusals, restarts, keys, limits and ends of connections."""

import asyncio
import contextlib
import gc
import resource
import socket as unix
import threading
import time
from contextlib import closing
from pathlib import Path

import msgpack
import pytest
import zmq

from kvbridge.control.keys import generate_keys
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peers import PeerClient, PeerIdentity, PeerServer
from kvbridge.control.sockets import ConnectionLimit, SocketContext
from kvbridge.core.errors import ConfigError, ConflictError, InvalidInputError
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, PEER, Envelope
from kvbridge.core.wire.messages import Drained, Heartbeat
from tests.helpers.local_servers import held_ports

WAIT_S = 20.0
LOOPBACK = "tcp://127.0.0.1:0"
SERVER, CLIENT = "5" * 16, "c" * 16


class Recorder:
    def __init__(self):
        self.messages, self.undelivered, self.refused, self.resets, self.cuts = [], [], [], [], []
        self.handler = None
        self._changed = asyncio.Event()
        self.callbacks = PeerCallbacks(
            self._on_message,
            on_undelivered=lambda peer, message, age_s: self._note(self.undelivered, (peer, message, age_s >= 0)),
            on_refused=lambda kind, detail: self._note(self.refused, str(kind) if detail else "undetailed"),
            on_reset=lambda peer: self._note(self.resets, peer),
            on_cut=lambda: self._note(self.cuts, True),
        )

    def _note(self, where, what):
        where.append(what)
        self._changed.set()

    def _on_message(self, peer, message):
        self._note(self.messages, (peer, message))
        if self.handler:
            self.handler(peer, message)

    @property
    def rooms(self):
        return [message.room for _, message in self.messages if not isinstance(message, Heartbeat)]

    async def until(self, condition):
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Stage:
    """Makes servers and clients, and closes them all."""

    def __init__(self, stack):
        self.stack = stack
        self.context = SocketContext()
        stack.callback(self.context.close)

    def server(self, incarnation=SERVER, *, keys=None, settings=None, endpoint=LOOPBACK):
        recorder = Recorder()
        server = PeerServer(PeerIdentity(incarnation, keys), recorder.callbacks, endpoint, settings=settings)
        self.stack.callback(server.close)
        return server, recorder, server.endpoint

    def client(self, endpoint, incarnation=CLIENT, *, keys=None, server_key="", settings=None):
        recorder = Recorder()
        client = PeerClient(
            PeerIdentity(incarnation, keys),
            recorder.callbacks,
            endpoint,
            server_key=server_key,
            context=self.context,
            settings=settings,
        )
        self.stack.callback(client.close)
        return client, recorder

    def raw(self, endpoint, **options):
        dealer = self.context.zmq.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(endpoint)
        self.stack.callback(dealer.close)
        return dealer


@pytest.fixture
async def stage():
    with contextlib.ExitStack() as stack:
        yield Stage(stack)


def drained(room):
    return Drained(room=room, generation=1)


def frame(*, recipient="", link=1, sequence=1, acknowledged=0, body=None):
    return PEER.encode(Envelope(CLIENT, recipient, link, sequence, acknowledged, body))


async def poll(condition, beat=lambda: None):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            beat()
            await asyncio.sleep(0.01)


async def met(stage, settings=None):
    """Return a server and a client with their recorders, once the client's first message has arrived."""
    server, at_server, endpoint = stage.server(settings=settings)
    client, at_client = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    return server, at_server, client, at_client


async def test_messages_go_both_ways_in_order(stage):
    server, at_server, endpoint = stage.server()
    client, at_client = stage.client(endpoint)
    at_server.handler = server.send
    for room in range(300):
        client.send(drained(room))
    await at_client.until(lambda: len(at_client.messages) == 300)
    assert at_server.rooms == at_client.rooms == list(range(300))
    assert server.peers == (CLIENT,)
    assert client.link.peer == SERVER
    assert {peer for peer, _ in at_client.messages} == {SERVER}
    assert await client.flush(WAIT_S)
    assert await server.flush(WAIT_S)
    assert server.link(CLIENT).silent_s < WAIT_S
    assert client.link.silent_s < WAIT_S
    assert at_server.undelivered == at_client.undelivered == []


async def test_refusals_are_counted_and_kill_nothing(stage):
    _, at_server, endpoint = stage.server()
    raw = stage.raw(endpoint)
    good = frame(body=drained(1))
    for parts, kind in (
        ([good[:-4]], "malformed"),
        ([good, b"more"], "malformed"),
        ([bytes(MAX_FRAME_BYTES + 1)], "oversized"),
        ([b"\x97\x07" + good[2:]], "version"),
        ([msgpack.packb([1, "s", "", 1, 1, 0, {"type": "nothing"}])], "type"),
        ([msgpack.packb([1, "s", "", 1, 1, 0, {"type": "drained", "room": "x", "generation": 1}])], "field"),
        ([frame(recipient="e" * 16, body=drained(1))], "stale"),
        ([frame(link=0, body=drained(1))], "stale"),
        ([frame(sequence=0, body=drained(1))], "protocol"),
        ([frame(acknowledged=99, body=drained(1))], "protocol"),
    ):
        raw.send_multipart(parts)
        await at_server.until(lambda: at_server.refused)
        assert at_server.refused == [kind], parts
        at_server.refused.clear()
    assert at_server.messages == []
    raw.send(good)
    await at_server.until(lambda: at_server.rooms == [1])


async def test_asking_who_is_there_leaves_no_trace(stage):
    """A client that reaches its server by a second address does not end the conversation by the first."""
    server, at_server, client, _ = await met(stage)
    raw = stage.raw(server.endpoint)
    raw.send(frame(link=0, sequence=0))
    await poll(lambda: raw.poll(0))
    answer = PEER.decode(raw.recv())
    assert (answer.sender, answer.recipient, answer.link, answer.body) == (SERVER, CLIENT, 0, None)
    client.send(drained(2))
    await at_server.until(lambda: at_server.rooms == [1, 2])
    assert server.peers == (CLIENT,)
    assert at_server.refused == []
    assert client.server == SERVER


async def test_a_handler_that_refuses_or_breaks_stops_nothing(stage):
    _, at_server, endpoint = stage.server()
    broken = []
    asyncio.get_running_loop().set_exception_handler(lambda _, facts: broken.append(facts["exception"]))

    def handler(_, message):
        if message.room == 1:
            raise InvalidInputError("no such thing")
        if message.room == 2:
            raise ZeroDivisionError

    at_server.handler = handler
    client, _ = stage.client(endpoint)
    for room in range(6):
        client.send(drained(room))
    await at_server.until(lambda: len(at_server.messages) == 6)
    assert at_server.rooms == list(range(6))
    # On a slow machine a message may come twice before it is acknowledged.
    assert [kind for kind in at_server.refused if kind != "duplicate"] == ["invalid_input"]
    assert [type(error) for error in broken] == [ZeroDivisionError]


async def test_a_restarted_server_is_noticed(stage):
    server, _, client, at_client = await met(stage)
    assert await client.flush(WAIT_S)
    with pytest.raises(ConflictError, match=rf"{server.endpoint} is taken by process \d+ \(.+\); stop what holds it"):
        stage.server("7" * 16, endpoint=server.endpoint)
    server.close()
    client.send(drained(2))
    new, at_new, _ = stage.server("6" * 16, endpoint=server.endpoint)
    await at_client.until(lambda: at_client.resets)
    assert at_client.resets == ["6" * 16]
    assert at_client.undelivered == [(SERVER, drained(2), True)]
    client.send(drained(3))
    await at_new.until(lambda: at_new.messages)
    assert at_new.rooms == [3]
    new.send(CLIENT, drained(4))
    await at_client.until(lambda: at_client.messages)
    assert at_client.messages == [("6" * 16, drained(4))]


async def test_a_forgotten_client_begins_anew(stage):
    server, at_server, client, at_client = await met(stage)
    assert await client.flush(WAIT_S)
    server.forget(CLIENT)
    client.send(Heartbeat())
    await at_client.until(lambda: at_client.resets == [SERVER])
    client.send(drained(9))
    await at_server.until(lambda: at_server.rooms == [1, 9])
    server.send(CLIENT, drained(10))
    await at_client.until(lambda: at_client.rooms == [10])


async def test_a_peer_that_sends_faster_than_the_loop_reads_has_to_wait(stage):
    """Else its frames, a megabyte each, fill this process's memory."""
    _, at_server, endpoint = stage.server()
    raw = stage.raw(endpoint, sndhwm=1, sndtimeo=500)
    taken, most = 0, 300
    with contextlib.suppress(zmq.Again):
        while taken < most:  # the loop does not turn meanwhile
            raw.send(bytes(1 << 18))
            taken += 1
    assert taken < most
    await at_server.until(lambda: len(at_server.refused) >= taken)


async def test_a_noisy_peer_leaves_time_for_others(stage):
    _, at_server, endpoint = stage.server()
    raw, heard = stage.raw(endpoint, sndtimeo=100), threading.Event()

    def make_noise():
        until_s = time.monotonic() + WAIT_S
        while not heard.is_set() and time.monotonic() < until_s:
            with contextlib.suppress(zmq.Again):
                raw.send(b"noise")

    noise = asyncio.create_task(asyncio.to_thread(make_noise))
    try:
        await at_server.until(lambda: len(at_server.refused) > 1_000)
        client, _ = stage.client(endpoint, "d" * 16)
        client.send(drained(1))
        await at_server.until(lambda: at_server.rooms == [1])
        assert not noise.done(), "the honest client waited for the end of the noise"
    finally:
        heard.set()
        await noise
    assert set(at_server.refused) <= {"malformed", "duplicate"}


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://host:0"])
async def test_leaving_the_machine_needs_keys_and_a_client_with_keys_those_of_its_server(stage, endpoint):
    for make in (lambda: stage.server(endpoint=endpoint), lambda: stage.client(endpoint)):
        with pytest.raises(ConfigError, match="without CURVE keys"):
            make()
    with pytest.raises(ConfigError, match="no public key is known"):
        stage.client(endpoint, keys=generate_keys())
    with pytest.raises(ConfigError, match="has no keys"):
        stage.client(endpoint, server_key=generate_keys().public)


async def test_nobody_takes_another_keys_incarnation(stage):
    owner, other = generate_keys(), generate_keys()
    keys = generate_keys(allowed=[owner.public, other.public])
    _, at_server, endpoint = stage.server(keys=keys)
    client, _ = stage.client(endpoint, keys=owner, server_key=keys.public)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    thief, _ = stage.client(endpoint, keys=other, server_key=keys.public)
    thief.send(drained(2))
    await at_server.until(lambda: "unauthenticated" in at_server.refused)
    client.send(drained(3))
    await at_server.until(lambda: at_server.rooms == [1, 3])


@pytest.mark.parametrize("who", ["not allowed", "wrong server key", "no keys"])
async def test_the_unauthenticated_are_refused_and_counted(stage, who):
    keys, stranger = generate_keys(), generate_keys()
    _, at_server, endpoint = stage.server(keys=keys)
    if who == "no keys":
        client, at_client = stage.client(endpoint)
    else:
        server_key = stranger.public if who == "wrong server key" else keys.public
        client, at_client = stage.client(endpoint, keys=stranger, server_key=server_key)
    client.send(drained(1))
    await at_server.until(lambda: at_server.refused)
    await at_client.until(lambda: at_client.refused)
    assert set(at_server.refused) == {"unauthenticated"}
    assert at_server.messages == []


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
    server, at_server, client, _ = await met(stage, PeerSettings(max_connections=10, handshake_s=60))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    stage.stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
    gc.collect()  # what earlier tests have left is not closed meanwhile
    before = open_descriptors()
    silent = set()
    async with asyncio.timeout(WAIT_S):
        for _ in range(10):  # no more at a time than the kernel lets wait for us (ZeroMQ's backlog is 100)
            silent |= {asyncio.create_task(connect_and_be_cut(stage, server.endpoint)) for _ in range(30)}
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
    stage.client(endpoint)[0].send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    assert "handshake" in at_server.refused


async def test_a_side_that_has_ended_shows_in_the_connection(stage):
    server, at_server, client, _ = await met(stage)
    await poll(lambda: client.link.peer)
    assert (server.link(CLIENT).cut_s, client.link.cut_s) == (0.0, 0.0)
    client.close()
    await poll(lambda: server.link(CLIENT).cut_s, lambda: server.send(CLIENT, Heartbeat()))
    again, at_again = stage.client(server.endpoint, "a" * 16)
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
        assert len(at_client.cuts) == 1


async def test_a_connection_on_which_nobody_answers_is_not_one_that_is_gone(stage):
    with unix.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(WAIT_S)
        client, at_client = stage.client(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        client.send(drained(1))
        for _ in range(2):
            connection, _ = await asyncio.to_thread(silent.accept)
            connection.settimeout(WAIT_S)
            assert connection.recv(1) == b"\xff", "ZeroMQ's greeting"
            connection.close()  # as a peer with other keys does
        assert (client.link.cut_s, at_client.cuts) == (0.0, [])


async def test_a_connection_that_is_back_is_known_at_once_on_both_sides(stage):
    """A heartbeat may take long; the side that connects sends at once."""
    server, at_server, client, at_client = await met(stage)
    await poll(lambda: client.link.peer)
    client._raw.disconnect(server.endpoint)
    await poll(lambda: client.link.cut_s, lambda: client.send(Heartbeat()))
    await poll(lambda: server.link(CLIENT).cut_s, lambda: server.send(CLIENT, Heartbeat()))
    client._raw.connect(server.endpoint)
    await poll(lambda: not server.link(CLIENT).cut_s and not client.link.cut_s)
    assert (at_server.resets, at_client.resets) == ([], [])


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
