"""Requests of the router to prefill and decode servers, also when a server fails."""

import asyncio
import json
import socket

import httpx
import pytest

from kvbridge.core.ids import MAX_ROOM, Role
from tests.helpers.openai_servers import ADDRESSES, WAIT_S, OpenAiServer
from tests.integration.router.fleet import CHAT, COMPLETION, fleet, within


async def test_the_first_request_teaches_addresses_and_the_next_goes_to_both_at_once():
    async with fleet() as made:
        (prefill,), (decode,) = made.prefill, made.decode
        first = await made.post()
        assert first.json()["choices"][0]["text"] == "one two three"
        assert prefill.received[0].params["do_remote_decode"] is True
        assert "kvbridge" not in prefill.received[0].params
        assert decode.received[0].params["kvbridge"] == {"room": "p0-1", "prefill": ADDRESSES}

        prefill.gate = asyncio.Event()  # it answers when decode has been asked, too
        under_way = asyncio.create_task(made.post())
        to_prefill, to_decode = await prefill.request(1), await decode.request(1)
        assert not to_prefill.answered
        prefill.gate.set()
        assert (await under_way).json() == first.json()
        room = to_prefill.ours["room"]
        assert isinstance(room, str)
        assert 0 <= int(room) <= MAX_ROOM
        assert to_prefill.params == {"do_remote_decode": True, "do_remote_prefill": False, "kvbridge": {"room": room}}
        ours = {"room": room, "prefill": ADDRESSES}
        assert to_decode.params == {"do_remote_decode": False, "do_remote_prefill": True, "kvbridge": ours}
        await made.counted("kvbridge_router_requests_total", order="plain", outcome="answered")
        await made.counted("kvbridge_router_requests_total", order="paired", outcome="answered")


@pytest.mark.parametrize(
    ("path", "body", "taught"), [("/v1/completions", COMPLETION, False), ("/v1/chat/completions", CHAT, True)]
)
async def test_streams_and_answers_are_passed_through_byte_for_byte(path, body, taught):
    async with fleet(taught=taught) as made:
        assert await made.stream(body, path) == b"".join(made.decode[0].events())
        operation = {"gen_ai_operation_name": "chat" if body is CHAT else "text_completion"}
        await made.counted("gen_ai_server_time_to_first_token_seconds_count", **operation)
        await made.counted("gen_ai_server_request_duration_seconds_count", **operation, error_type="")
        whole = await made.post(body, path)
        assert whole.json() == {"id": "d0", "model": "m", "choices": [{"text": "one two three"}]}
        assert whole.headers["content-type"] == "application/json"
        for asked in made.decode[0].received:
            assert asked.path == path
            added = {"kv_transfer_params", "stream"}
            assert {key: value for key, value in asked.body.items() if key not in added} == body
        for asked in made.prefill[0].received:
            assert (asked.path, asked.body["max_tokens"], asked.body["stream"]) == (path, 1, False)
            assert asked.body.get("max_completion_tokens", 1) == 1


async def test_pieces_of_a_stream_are_not_held_back():
    async with fleet(taught=True) as made:
        gates = [asyncio.Event() for _ in range(5)]
        made.decode[0].between = lambda number: gates[number]
        events = made.decode[0].events()
        gates[0].set()
        gates[1].set()
        async with made.client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as answer:
            assert answer.headers["x-of-the-engine"] == "d0"
            seen = b""
            pieces = answer.aiter_raw()
            for number in range(2, 6):
                while seen != b"".join(events[:number]):
                    seen += await asyncio.wait_for(anext(pieces), WAIT_S)
                if number < 5:
                    gates[number].set()


async def test_what_another_connector_answers_is_passed_on_as_it_is():
    async with fleet(connector="nixl") as made:
        for _ in range(2):
            assert (await made.post()).status_code == 200
        held = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
        assert [one.params for one in made.decode[0].received] == [held] * 2
        assert all(one.params["remote_engine_id"] is None for one in made.prefill[0].received)


async def test_a_connector_that_draws_its_own_rooms_is_asked_in_plain_order_from_then_on():
    async with fleet(connector="kvbridge-plain", taught=True) as made:
        made.prefill[0].gate = asyncio.Event()
        under_way = asyncio.create_task(made.post())
        await made.decode[0].request(0)
        made.prefill[0].gate.set()
        assert (await under_way).status_code == 200
        assert (await made.post()).status_code == 200
        first, again, later = made.decode[0].received
        await within(first.left)
        assert [one.ours["room"] for one in (again, later)] == ["p0-1", "p0-2"]
        assert len(made.prefill[0].received) == 2
        assert "kvbridge" not in made.prefill[0].received[1].params


def fails_with_status(server: OpenAiServer) -> None:
    server.status = 500


def breaks(server: OpenAiServer) -> None:
    server.breaks_at = 0


@pytest.mark.parametrize(("fail", "taught"), [(fails_with_status, False), (breaks, True)], ids=["plain", "paired"])
async def test_a_prefill_that_fails_is_replaced_under_another_room(fail, taught):
    async with fleet(prefill=2, taught=taught) as made:
        first, second = made.prefill
        fail(first)
        first.gate = asyncio.Event()
        under_way = asyncio.create_task(made.stream())
        await (made.decode[0] if taught else first).request(0)
        first.gate.set()
        assert await under_way == b"".join(made.decode[0].events())
        assert (len(first.received), len(second.received)) == (1, 1)
        if taught:
            lost, kept = made.decode[0].received
            await within(lost.left)
            assert lost.ours["room"] != kept.ours["room"] == second.received[0].ours["room"]
        else:
            assert len(made.decode[0].received) == 1


async def test_a_prefill_that_is_not_there_is_out_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with fleet(taught=True) as made:
            made.router.servers.use(Role.PREFILL, [url, made.prefill[0].url])
            gone = made.router.servers.of(Role.PREFILL)[0]
            gone.is_well()
            for _ in range(3):
                assert (await made.post()).status_code == 200
            assert len(made.prefill[0].received) == 3
            assert "nobody listens there" in gone.problem
            await made.counted("kvbridge_router_attempts_failed_total", role="prefill", reason="connect")


async def test_an_engine_that_fails_before_the_first_token_of_a_stream_is_replaced():
    """The error comes after the answer's role, under a status of 200."""
    async with fleet(decode=2, taught=True) as made:
        made.decode[0].begins_with_error = 500
        assert await made.stream(CHAT, "/v1/chat/completions") == b"".join(made.decode[1].events())


@pytest.mark.parametrize(("role", "taught"), [("prefill", False), ("decode", True)])
async def test_what_a_server_says_of_the_client_is_passed_on(role, taught):
    async with fleet(prefill=2, decode=2, taught=taught) as made:
        for server in getattr(made, role):
            server.status = 400
        answer = await made.post()
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"{role[0]}0 says 400"
        assert len(made.all_received(role)) == 1


async def test_a_stream_that_breaks_ends_with_an_error_and_not_as_if_it_were_whole():
    async with fleet(decode=2, taught=True) as made:
        seen = asyncio.Event()
        made.decode[0].breaks_at = 3
        made.decode[0].between = lambda number: seen if number == 2 else None
        events = made.decode[0].events()
        async with made.client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as answer:
            pieces = answer.aiter_raw()
            content = await asyncio.wait_for(anext(pieces), WAIT_S)
            seen.set()
            content += b"".join([piece async for piece in pieces])
        assert content.startswith(b"".join(events[:2]))
        error = json.loads(content.rpartition(b"data: ")[2])["error"]
        assert made.decode[0].url in error["message"]
        assert b"[DONE]" not in content
        assert made.decode[1].received == []
        await made.counted("kvbridge_router_requests_total", order="paired", outcome="broken")


async def test_an_answer_that_breaks_is_cut_off():
    async with fleet(taught=True) as made:
        seen = asyncio.Event()
        made.decode[0].breaks_at = 1
        made.decode[0].between = lambda _number: seen
        async with made.client.stream("POST", "/v1/completions", json=COMPLETION) as answer:
            assert answer.status_code == 200
            seen.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await answer.aread()


async def test_no_server_that_is_well_is_told_at_once():
    async with fleet() as made:
        made.prefill[0].health = 503
        await made.look()
        answer = await made.post()
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "not_ready")
        assert int(answer.headers["retry-after"]) >= 1
        assert "/health answered 503" in answer.json()["error"]["message"]
        ready = await made.client.get("/ready")
        assert ready.status_code == 503
        assert (await made.client.get("/health")).status_code == 200
        made.prefill[0].health = 200
        await made.look()
        assert (await made.client.get("/ready")).status_code == 200


async def test_requests_are_taken_away_from_a_server_that_hangs():
    async with fleet(prefill=2, taught=True) as made:
        first, second = made.prefill
        first.gate = asyncio.Event()
        under_way = asyncio.create_task(made.post())
        received = await first.request(0)
        first.health = 503
        for _ in range(3):
            assert not under_way.done()
            await made.look()
        assert (await under_way).status_code == 200
        await within(received.left)
        assert len(second.received) == 1


async def test_a_check_that_is_not_answered_is_a_bad_one():
    async with fleet(timeouts={"health_s": 0.2}) as made:
        made.decode[0].hangs = True
        await made.look()
        assert "timeouts.health_s" in made.server(made.decode[0]).problem
