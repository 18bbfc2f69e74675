"""Two daemons' control sockets over real TCP: delivery, refusals, new lives. Port 0 only, every wait bounded."""

import asyncio
import contextlib
import gc
import random
import resource
import socket as unix
import struct
import threading
import time
from pathlib import Path

import msgpack
import pytest
import pytest_asyncio
import zmq

from kvbridge.control.keys import generate_keys
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peer_client import PeerClient
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.control.sockets import LoopSocket, SocketContext
from kvbridge.core.errors import (
    CapacityError,
    ConfigError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
)
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, PEER, Envelope
from kvbridge.core.wire.delivery import DeliverySettings
from kvbridge.core.wire.messages import Abort, Drained, Heartbeat
from tests.helpers.held_ports import held_ports
from tests.helpers.later_release import LaterCodec

pytestmark = pytest.mark.asyncio

WAIT_S = 20.0
LOOPBACK = "tcp://127.0.0.1:0"
FAST = DeliverySettings(resend_first_s=0.1, resend_most_s=0.5)
SERVER, CLIENT = "5" * 16, "c" * 16


class Recorder:
    """Callbacks that remember."""

    def __init__(self):
        self.messages, self.undelivered, self.refused, self.resets = [], [], [], []
        self.resent = self.cuts = 0
        self.handler = None
        self._changed = asyncio.Event()
        self.callbacks = PeerCallbacks(
            self._on_message, self._on_undelivered, self._on_refused, self._on_resent, self._on_reset, self._on_cut
        )

    def _note(self, where, what):
        where.append(what)
        self._changed.set()

    def _on_message(self, peer, message):
        self._note(self.messages, (peer, message))
        if self.handler:
            self.handler(peer, message)

    def _on_undelivered(self, peer, message, age_s):
        assert age_s >= 0
        self._note(self.undelivered, (peer, message))

    def _on_refused(self, kind, detail):
        assert detail
        self._note(self.refused, str(kind))

    def _on_resent(self, count):
        self.resent += count

    def _on_cut(self):
        self.cuts += 1
        self._changed.set()

    def _on_reset(self, peer):
        self._note(self.resets, peer)

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


@pytest_asyncio.fixture
async def stage():
    with contextlib.ExitStack() as stack:
        yield Stage(stack)


def drained(room):
    return Drained(room=room, generation=1)


def frame(*, recipient="", link=1, sequence=1, acknowledged=0, body=None):
    return PEER.encode(Envelope(CLIENT, recipient, link, sequence, acknowledged, body))


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


async def test_two_clients_and_a_second_conversation_of_one(stage):
    server, at_server, endpoint = stage.server()
    first, _ = stage.client(endpoint)
    other, _ = stage.client(endpoint, "d" * 16)
    first.send(drained(1))
    other.send(drained(2))
    await at_server.until(lambda: len(at_server.messages) == 2)
    first.close()
    again, _ = stage.client(endpoint)
    again.send(drained(3))
    await at_server.until(lambda: len(at_server.messages) == 3)
    assert sorted(at_server.rooms) == [1, 2, 3]
    assert sorted(server.peers) == [CLIENT, "d" * 16]
    with pytest.raises(ConflictError, match="was closed"):
        first.send(drained(4))


async def test_a_client_may_start_before_its_server(stage):
    [port] = stage.stack.enter_context(held_ports(1))
    endpoint = f"tcp://127.0.0.1:{port}"
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    _, at_server, _ = stage.server(endpoint=endpoint)
    await at_server.until(lambda: at_server.rooms == [1])


async def test_a_heartbeat_is_sent_once_and_never_waits_for_anyone(stage):
    server, at_server, endpoint = stage.server()
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    client.send(Heartbeat())
    await at_server.until(lambda: len(at_server.messages) == 2)
    assert await client.flush(WAIT_S)
    server.close()
    for _ in range(20_000):
        client.send(Heartbeat())
    assert await client.flush(WAIT_S)


async def test_refusals_are_counted_and_kill_nothing(stage):
    _, at_server, endpoint = stage.server()
    raw = stage.raw(endpoint)
    good = frame(body=drained(1))
    for parts, kind in (
        ([b""], "malformed"),
        ([b"\xc1nonsense"], "malformed"),
        ([good[:-4]], "malformed"),
        ([good, b"more"], "malformed"),
        ([b"\x91" * 2_000], "malformed"),
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


async def test_a_far_too_large_frame_costs_its_sender_the_connection(stage):
    _, at_server, endpoint = stage.server()
    raw = stage.raw(endpoint, reconnect_ivl=-1)
    monitor = raw.get_monitor_socket(zmq.Event.DISCONNECTED)
    stage.stack.callback(raw.disable_monitor)
    stage.stack.callback(monitor.close)
    raw.send(bytes(3 * MAX_FRAME_BYTES))
    assert await asyncio.to_thread(monitor.poll, WAIT_S * 1_000)
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])


async def test_a_replayed_frame_is_delivered_once(stage):
    _, at_server, endpoint = stage.server()
    raw = stage.raw(endpoint)
    for _ in range(3):
        raw.send(frame(body=drained(1)))
    raw.send(frame(sequence=2, body=drained(2)))
    await at_server.until(lambda: len(at_server.rooms) == 2)
    assert at_server.rooms == [1, 2]
    assert at_server.refused == ["duplicate", "duplicate"]


async def test_asking_who_is_there_leaves_no_trace(stage):
    """So a client whose server is reached by another address already ends nothing of that conversation."""
    server, at_server, endpoint = stage.server()
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    raw = stage.raw(endpoint)
    raw.send(frame(link=0, sequence=0))
    await poll(lambda: raw.poll(0))
    answer = PEER.decode(raw.recv())
    assert (answer.sender, answer.recipient, answer.link, answer.body) == (SERVER, CLIENT, 0, None)
    client.send(drained(2))
    await at_server.until(lambda: at_server.rooms == [1, 2])
    assert server.peers == (CLIENT,)
    assert at_server.refused == []
    assert client.server == SERVER


async def test_an_older_link_is_stale(stage):
    server, at_server, endpoint = stage.server()
    raw = stage.raw(endpoint)
    raw.send(frame(link=5, body=drained(1)))
    raw.send(frame(link=4, body=drained(2)))
    await at_server.until(lambda: at_server.refused == ["stale"])
    assert at_server.rooms == [1]
    server.forget(CLIENT)
    with pytest.raises(NotFoundError, match="was forgotten"):
        server.send(CLIENT, drained(1))


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
    server, at_server, endpoint = stage.server()
    client, at_client = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    assert await client.flush(WAIT_S)
    server.close()
    client.send(drained(2))
    new, at_new, _ = stage.server("6" * 16, endpoint=endpoint)
    await at_client.until(lambda: at_client.resets)
    assert at_client.resets == ["6" * 16]
    assert [(peer, message.room) for peer, message in at_client.undelivered] == [(SERVER, 2)]
    client.send(drained(3))
    await at_new.until(lambda: at_new.messages)
    assert at_new.rooms == [3]
    new.send(CLIENT, drained(4))
    await at_client.until(lambda: at_client.messages)
    assert at_client.messages == [("6" * 16, drained(4))]


async def test_a_forgotten_client_begins_anew(stage):
    server, at_server, endpoint = stage.server()
    client, at_client = stage.client(endpoint)
    for room in range(3):
        client.send(drained(room))
    await at_server.until(lambda: len(at_server.rooms) == 3)
    assert await client.flush(WAIT_S)
    server.forget(CLIENT)
    client.send(Heartbeat())
    await at_client.until(lambda: at_client.resets == [SERVER])
    client.send(drained(9))
    await at_server.until(lambda: at_server.rooms == [0, 1, 2, 9])
    server.send(CLIENT, drained(10))
    await at_client.until(lambda: at_client.rooms == [10])


async def test_undelivered_is_reported_and_the_outbox_is_bounded(stage):
    settings = PeerSettings(delivery=DeliverySettings(give_up_s=0.1, window=4, max_held=8))
    client, at_client = stage.client("tcp://127.0.0.1:9", settings=settings)
    for room in range(8):
        client.send(drained(room))
    with pytest.raises(CapacityError, match="8 messages wait"):
        client.send(drained(9))
    await at_client.until(lambda: len(at_client.undelivered) == 8)
    assert [message.room for _, message in at_client.undelivered] == list(range(8))


async def test_a_noisy_peer_leaves_time_for_others(stage):
    _, at_server, endpoint = stage.server()
    raw, heard = stage.raw(endpoint, sndtimeo=100), threading.Event()

    def make_noise():
        """More than the server can take, until it has heard the other one, or will not."""
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


# ------------------------------------------------------------------------------------------------ addresses and keys


async def test_a_taken_port_names_itself_and_its_holder(stage):
    _, _, endpoint = stage.server()
    with pytest.raises(ConflictError, match=rf"{endpoint} is taken by process \d+ \(.+\); stop what holds it"):
        stage.server("7" * 16, endpoint=endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:0", "tcp://[::]:0", "tcp://host:0"]
)
async def test_leaving_the_machine_needs_keys(stage, endpoint):
    with pytest.raises(ConfigError, match="without CURVE keys"):
        stage.server(endpoint=endpoint)
    with pytest.raises(ConfigError, match="without CURVE keys"):
        stage.client(endpoint)


async def test_a_network_can_be_trusted_on_request(stage):
    server = PeerServer(PeerIdentity(SERVER, insecure=True), Recorder().callbacks, "tcp://0.0.0.0:0")
    stage.stack.callback(server.close)
    assert server.endpoint.startswith("tcp://0.0.0.0:")


async def test_keys_let_in_whom_they_name(stage):
    client_keys = generate_keys()
    keys = generate_keys(allowed=[client_keys.public])
    server, at_server, endpoint = stage.server(keys=keys, endpoint="tcp://0.0.0.0:0")
    endpoint = endpoint.replace("0.0.0.0", "127.0.0.1")
    client, at_client = stage.client(endpoint, keys=client_keys, server_key=keys.public)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    server.send(CLIENT, drained(2))
    await at_client.until(lambda: at_client.rooms == [2])
    # On a slow machine a message may come twice before it is acknowledged.
    assert {*at_server.refused, *at_client.refused} <= {"duplicate"}


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


async def test_a_client_with_keys_wants_to_know_its_server(stage):
    with pytest.raises(ConfigError, match="no public key is known"):
        stage.client("tcp://127.0.0.1:9", keys=generate_keys())
    with pytest.raises(ConfigError, match="has no keys"):
        stage.client("tcp://127.0.0.1:9", server_key=generate_keys().public)


# ------------------------------------------------------------------------------------------------ a bad network


class BadNetwork:
    """Stands between a client and a server and loses and doubles frames both ways."""

    def __init__(self, stage, endpoint, *, seed, loss, double):
        self.random = random.Random(seed)
        self.loss, self.double = loss, double
        self.client = b""
        front, back = stage.context.open(zmq.ROUTER), stage.context.open(zmq.DEALER)
        front.bind(LOOPBACK)
        self.endpoint = front.getsockopt_string(zmq.LAST_ENDPOINT)
        back.connect(endpoint)
        self.front, self.back = LoopSocket(front, self.to_server), LoopSocket(back, self.to_client)
        stage.stack.callback(self.front.close)
        stage.stack.callback(self.back.close)

    def to_server(self, parts):
        self.client = parts[0].bytes
        self.forward(self.back, [parts[1].bytes])

    def to_client(self, parts):
        self.forward(self.front, [self.client, parts[0].bytes])

    def forward(self, socket, parts):
        copies = 0 if self.random.random() < self.loss else 2 if self.random.random() < self.double else 1
        for _ in range(copies):
            socket.send(parts)


@pytest.mark.parametrize("seed", [1, 2])
async def test_each_message_once_and_in_order_over_a_bad_network(stage, seed):
    server, at_server, endpoint = stage.server()
    network = BadNetwork(stage, endpoint, seed=seed, loss=0.05, double=0.1)
    client, at_client = stage.client(network.endpoint)
    for room in range(200):
        client.send(drained(room))
    await at_server.until(lambda: at_server.messages)
    for room in range(200):
        server.send(CLIENT, drained(room))
    await at_server.until(lambda: len(at_server.rooms) >= 200)
    await at_client.until(lambda: len(at_client.rooms) >= 200)
    assert await client.flush(WAIT_S)
    assert await server.flush(WAIT_S)
    assert at_server.rooms == at_client.rooms == list(range(200))
    assert client.link.silent_s < WAIT_S
    assert at_client.resent > 0
    assert set(at_server.refused) == {"duplicate", "out_of_order"}
    assert at_server.undelivered == at_client.undelivered == at_client.resets == []


async def test_a_broken_connection_of_the_same_link_goes_on(stage):
    _, at_server, endpoint = stage.server()
    first, second = stage.raw(endpoint), stage.raw(endpoint)
    first.send(frame(sequence=1, body=drained(1)))
    await at_server.until(lambda: at_server.rooms == [1])
    first.close()
    second.send(frame(sequence=1, body=drained(1)))
    second.send(frame(sequence=2, body=Abort(room=2, generation=1, code="cancelled", message="")))
    await at_server.until(lambda: at_server.rooms == [1, 2])
    assert at_server.refused == ["duplicate"]


async def test_a_reset_tcp_connection_and_foreign_protocols_are_harmless(stage):
    _, at_server, endpoint = stage.server()
    port = int(endpoint.rsplit(":", 1)[1])
    for payload in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + bytes(200)):
        with unix.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
            connection.setsockopt(unix.SOL_SOCKET, unix.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(payload)
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])


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


async def poll(condition, beat=lambda: None):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            beat()
            await asyncio.sleep(0.01)


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


async def test_a_server_hears_when_a_client_it_knew_begins_anew(stage):
    _, at_server, endpoint = stage.server()
    client, _ = stage.client(endpoint)
    client.send(drained(1))
    await at_server.until(lambda: at_server.rooms == [1])
    assert at_server.resets == []
    client.close()
    again, _ = stage.client(endpoint)
    again.send(drained(2))
    await at_server.until(lambda: at_server.rooms == [1, 2])
    assert at_server.resets == [CLIENT]


async def test_what_a_later_release_adds_is_ignored_on_both_ends(stage):
    server, at_server, endpoint = stage.server()
    client, at_client = stage.client(endpoint)
    for end in (server, client):
        end._shared.codec = LaterCodec.of(end._shared.codec)
    at_server.handler = server.send
    sent = [drained(1), Abort(room=2, generation=1, code="aborted", message="enough"), drained(3)]
    for message in sent:
        client.send(message)
    await at_client.until(lambda: len(at_client.messages) == len(sent))
    assert [message for _, message in at_client.messages] == sent
    # On a busy machine a message is sent again before it is acknowledged.
    assert {*at_server.refused, *at_client.refused} <= {"duplicate"}
