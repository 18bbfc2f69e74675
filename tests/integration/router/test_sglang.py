"""Requests of the router to pairs of SGLang."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.router.fleet import CHAT, COMPLETION, fleet

PLACE = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}


@pytest.mark.parametrize("order", ["paired", "plain"])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_both_servers_get_the_request_at_once_with_a_room_of_its_own(order, path, body):
    async with fleet(connector="sglang", order=order) as made:
        (prefill,), (decode,) = made.prefill, made.decode
        assert all(one.paired for one in made.router.status().servers)
        prefill.gate = asyncio.Event()  # it answers when decode has been asked, too
        under_way = asyncio.create_task(made.stream(body, path))
        to_prefill, to_decode = await prefill.request(0), await decode.request(0)
        prefill.gate.set()
        assert await under_way == b"".join(decode.events())
        room = to_prefill.body["bootstrap_room"]
        assert to_decode.body == body | PLACE | {"bootstrap_room": room, "stream": True}
        assert to_prefill.body == to_decode.body | {"stream": False}
        assert (await made.post(body, path)).json()["choices"][0]["text"] == "one two three"
        assert 0 < room < 1 << 63
        assert room != decode.received[1].body["bootstrap_room"]
        await made.counted("kvbridge_router_requests_total", 2, order="paired", outcome="answered")


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [({"n": 2}, 400, "several answers"), ({"echo": True}, 400, "probabilities"), ({"prompt": ["a", "b"]}, 200, "one")],
)
async def test_decode_computes_no_prompt(more, status, words):
    async with fleet(connector="sglang") as made:
        answer = await made.post(COMPLETION | more)
        assert (answer.status_code, words in answer.text) == (status, True)
        assert len(made.prefill[0].received) == len(made.decode[0].received) == (status == 200)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_fails_is_replaced_under_another_room(role):
    async with fleet(prefill=2, decode=2, connector="sglang") as made:
        getattr(made, role)[0].status = 500
        assert await made.stream() == b"".join(made.decode[role == "decode"].events())
        for servers in (made.prefill, made.decode):
            rooms = [one.room for server in servers for one in server.received]
            assert len(rooms) == len(set(rooms)) == 2


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"disaggregation_mode": "decode", "disaggregation_bootstrap_port": 1}, "name it as a decode server"),
        ({"status": 401}, "--api-key"),
        ({"status": 503}, "503"),
    ],
)
async def test_a_server_that_is_not_known_for_prefill_gets_no_request(info, words):
    async with fleet(connector="sglang") as made:
        server = made.server(made.prefill[0])
        server.is_gone("it ended")
        made.prefill[0].info = info
        await made.look()
        assert words in server.problem
        assert (await made.post()).status_code == 503


async def test_a_server_that_comes_back_as_another_engine_is_asked_as_such():
    async with fleet(connector="sglang") as made:
        for server in (*made.prefill, *made.decode):
            made.server(server).is_gone("it ended")
            server.info = {}
        await made.look()
        await made.post()
        assert made.prefill[0].received[0].params["do_remote_decode"] is True
