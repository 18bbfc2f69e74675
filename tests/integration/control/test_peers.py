"""Two daemons' control sockets over real TCP: delivery, refusals, new lives, keys."""

import asyncio
import contextlib
import threading
import time

import msgpack
import pytest
import zmq

from kvbridge.control.keys import generate_keys
from kvbridge.core.errors import (
    ConfigError,
    ConflictError,
    InvalidInputError,
)
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, PEER
from kvbridge.core.wire.messages import Heartbeat
from tests.integration.control.stage import CLIENT, SERVER, WAIT_S, drained, frame, poll

pytestmark = pytest.mark.asyncio


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


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://host:0"])
async def test_leaving_the_machine_needs_keys(stage, endpoint):
    with pytest.raises(ConfigError, match="without CURVE keys"):
        stage.server(endpoint=endpoint)
    with pytest.raises(ConfigError, match="without CURVE keys"):
        stage.client(endpoint)


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
