"""The router between real sockets: what each side is sent and gets, and what becomes of requests when something fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kvbridge.config.router import RouterConfig
from kvbridge.config.schema import BootstrapConfig
from kvbridge.core.ids import MAX_ROOM, Role
from kvbridge.daemon.bootstrap import BootstrapDaemon
from kvbridge.daemon.router import RouterDaemon
from kvbridge.router.bodies import MOST_VALUES
from tests.helpers.fleet import Fleet as FleetOfNodes
from tests.helpers.openai_servers import ADDRESSES, WAIT_S, HeldRooms, OpenAiServer, Received

pytestmark = pytest.mark.asyncio

COMPLETION = {"model": "m", "prompt": "How do you do?", "max_tokens": 3}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "How do you do?"}], "max_completion_tokens": 3}


class Fleet:
    """A router and its servers in one loop, and a client."""

    def __init__(self, prefill: int, decode: int, connector: str) -> None:
        self.rooms = HeldRooms()
        self.prefill = [OpenAiServer(self.rooms, name=f"p{number}", connector=connector) for number in range(prefill)]
        self.decode = [OpenAiServer(self.rooms, name=f"d{number}") for number in range(decode)]
        self.router: RouterDaemon
        self.client: httpx.AsyncClient

    async def post(
        self, body: dict[str, Any] = COMPLETION, path: str = "/v1/completions", **more: Any
    ) -> httpx.Response:
        return await self.client.post(path, json=body, **more)

    async def stream(self, body: dict[str, Any] = COMPLETION, path: str = "/v1/completions") -> bytes:
        answer = await self.post(body | {"stream": True}, path)
        assert answer.status_code == 200, answer.text
        return answer.content

    async def look(self) -> None:
        """Have the router ask everybody how he is."""
        for role in Role:
            for server in self.router.servers.of(role):
                await self.router._health.look(server)

    def server(self, of: OpenAiServer) -> Any:
        return next(one for role in Role for one in self.router.servers.of(role) if one.url == of.url)

    def all_received(self, role: str) -> list[Received]:
        return [one for server in getattr(self, role) for one in server.received]

    async def counted(self, name: str, times: int = 1, **labels: str) -> None:
        """Wait until a counter stands there: an answer is counted when it has been sent."""
        await eventually(lambda: self._metric(name, labels) >= times)
        assert self._metric(name, labels) == times

    def _metric(self, name: str, labels: dict[str, str]) -> float:
        pieces, _ = self.router.render_metrics()
        for line in b"".join(pieces).decode().splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no {name} with {labels}")


@asynccontextmanager
async def fleet(
    prefill: int = 1, decode: int = 1, *, connector: str = "kvbridge", taught: bool = False, **config: Any
) -> AsyncIterator[Fleet]:
    """Run servers and a router that asks for their health when the test says so. `taught`: it knows all addresses."""
    made = Fleet(prefill, decode, connector)
    servers = [*made.prefill, *made.decode]
    for server in servers:
        await server.start()
    timeouts = {"health_interval_s": 3600.0, "health_s": 60.0} | config.pop("timeouts", {})
    named = {role: [one.url for one in getattr(made, role)] for role in ("prefill", "decode")}
    settings = {
        **({} if "bootstrap" in config else named),
        "http": {"port": 0} | config.pop("http", {}),
        "timeouts": timeouts,
        **config,
    }
    made.router = RouterDaemon(RouterConfig.model_validate(settings))
    try:
        await made.router.start()
        await made.router._health.close()  # from now on it is the test that has it asked
        await made.look()
        if taught:
            for server in made.prefill:
                made.server(server).addresses = ADDRESSES
        async with httpx.AsyncClient(base_url=made.router.url, timeout=WAIT_S, trust_env=False) as made.client:
            yield made
    finally:
        await made.router.close()
        for server in servers:
            await server.stop()


async def within(wait: asyncio.Event) -> None:
    await asyncio.wait_for(wait.wait(), WAIT_S)


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 - anything may become true
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------- the two orders


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
        assert to_decode.params == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "kvbridge": {"room": room, "prefill": ADDRESSES},
        }
        await made.counted("kvbridge_router_requests_total", order="plain", outcome="answered")
        await made.counted("kvbridge_router_requests_total", order="paired", outcome="answered")


async def test_each_room_is_drawn_anew():
    async with fleet(taught=True) as made:
        await asyncio.gather(*(made.post() for _ in range(20)))
        rooms = [one.ours["room"] for one in made.prefill[0].received]
        assert len(set(rooms)) == 20
        assert sorted(rooms) == sorted(one.ours["room"] for one in made.decode[0].received)


@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
async def test_streams_and_answers_are_passed_through_byte_for_byte(path, body, taught):
    async with fleet(taught=taught) as made:
        assert await made.stream(body, path) == b"".join(made.decode[0].events())
        whole = await made.post(body, path)
        assert whole.json() == {"id": "d0", "model": "m", "choices": [{"text": "one two three"}]}
        assert whole.headers["content-type"] == "application/json"
        for asked in made.decode[0].received:
            assert asked.path == path
            assert {
                key: value for key, value in asked.body.items() if key not in {"kv_transfer_params", "stream"}
            } == body
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


async def test_plain_order_can_be_asked_for():
    async with fleet(taught=True, order="plain") as made:
        for _ in range(2):
            assert (await made.post()).status_code == 200
        assert [one.ours["room"] for one in made.decode[0].received] == ["p0-1", "p0-2"]
        assert not any(one.ours for one in made.prefill[0].received)


async def test_what_another_connector_answers_is_passed_on_as_it_is():
    async with fleet(connector="nixl") as made:
        for _ in range(2):
            assert (await made.post()).status_code == 200
        assert [one.params for one in made.decode[0].received] == [
            {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
        ] * 2
        assert all(one.params["remote_engine_id"] is None for one in made.prefill[0].received)


async def test_a_prefill_that_holds_nothing_leaves_the_prompt_to_decode():
    async with fleet(connector="none") as made:
        assert (await made.post()).status_code == 200
        assert "kv_transfer_params" not in made.decode[0].received[0].body


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


async def test_a_prefill_with_other_addresses_is_asked_again_under_another_room():
    async with fleet(taught=True) as made:
        moved = [{"endpoint": "tcp://10.0.0.9:1", "public_key": ""}]
        made.prefill[0].addresses = moved
        made.prefill[0].gate = asyncio.Event()
        made.decode[0].gate = asyncio.Event()  # it cannot have reached anybody at the former ones
        under_way = asyncio.create_task(made.post())
        first = await made.decode[0].request(0)
        made.prefill[0].gate.set()
        again = await made.decode[0].request(1)
        await within(first.left)
        made.decode[0].gate.set()
        assert (await under_way).status_code == 200
        assert (first.ours["prefill"], again.ours["prefill"]) == (ADDRESSES, moved)
        assert first.ours["room"] != again.ours["room"]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"echo": True},
        {"prompt_logprobs": 0},
    ],
)
async def test_what_one_room_cannot_serve_decode_does_alone(more):
    async with fleet(taught=True) as made:
        mine = COMPLETION | more | {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
        assert (await made.post(mine)).status_code == 200
        assert made.prefill[0].received == []
        assert made.decode[0].received[0].body == COMPLETION | more
        await made.counted("kvbridge_router_requests_total", order="decode_alone", outcome="answered")


async def test_a_server_of_both_roles_does_not_send_to_itself():
    async with fleet(1, 2) as made:
        urls = [one.url for one in made.decode]
        for role in Role:
            made.router.servers.use(role, urls)
        await made.look()
        for _ in range(4):
            assert (await made.post()).status_code == 200
        assert len(made.all_received("decode")) == 8
        for server in made.decode:
            held = {one.ours.get("room") for one in server.received if one.params.get("do_remote_decode")}
            taken = {one.ours.get("room") for one in server.received if one.params.get("do_remote_prefill")}
            assert not (held - {None}) & taken


# ---------------------------------------------------------------------- failures


def fails_with_status(server: OpenAiServer) -> None:
    server.status = 500


def breaks(server: OpenAiServer) -> None:
    server.breaks_at = 0


FAILURES = [fails_with_status, breaks]


@pytest.mark.parametrize("fail", FAILURES)
@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
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


@pytest.mark.parametrize("fail", FAILURES)
@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
async def test_a_decode_that_fails_is_replaced_under_another_room(fail, taught):
    async with fleet(decode=2, taught=taught) as made:
        first, second = made.decode
        fail(first)
        assert await made.stream() == b"".join(second.events())
        assert (len(first.received), len(second.received)) == (1, 1)
        assert first.received[0].ours["room"] != second.received[0].ours["room"]


@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
async def test_an_engine_that_fails_before_the_first_token_of_a_stream_is_replaced(taught):
    """It says so behind the role of the answer, under a status of 200."""
    async with fleet(decode=2, taught=taught) as made:
        made.decode[0].begins_with_error = 500
        assert await made.stream(CHAT, "/v1/chat/completions") == b"".join(made.decode[1].events())


async def test_a_stream_that_says_that_the_client_is_wrong_is_passed_on():
    async with fleet(decode=2, taught=True) as made:
        made.decode[0].begins_with_error = 400
        assert b"it went wrong" in await made.stream()
        assert made.decode[1].received == []


@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_when_all_have_failed_the_client_is_told_who_and_why(role, taught):
    async with fleet(taught=taught) as made:
        (server,) = getattr(made, role)
        server.status = 503
        answer = await made.post()
        assert answer.status_code == 502
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("peer_failed", 502)
        assert f"{role} server {server.url}: answered 503" in error["message"]
        assert len(server.received) == 1


@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
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


async def test_a_server_that_speaks_something_else_is_a_failure_like_any_other():
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"+OK POP3 server ready\r\n")
        writer.close()

    elsewhere = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with elsewhere, fleet() as made:
        url = f"http://127.0.0.1:{elsewhere.sockets[0].getsockname()[1]}"
        made.router.servers.use(Role.PREFILL, [url])
        made.router.servers.of(Role.PREFILL)[0].is_well()
        answer = await made.post()
        assert (answer.status_code, answer.json()["error"]["type"]) == (502, "peer_failed")
        await made.look()
        assert made.router.servers.of(Role.PREFILL)[0].problem


async def test_texts_that_are_no_unicode_are_passed_on_as_they_came():
    async with fleet() as made:
        headers = {"content-type": "application/json"}
        content = b'{"prompt": "\\ud800 caf\\u00e9"}'
        assert (await made.client.post("/v1/completions", content=content, headers=headers)).status_code == 200
        assert made.decode[0].received[0].body["prompt"] == "\ud800 caf\u00e9"
        assert made.decode[0].received[0].headers["accept-encoding"] == "identity"


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


@pytest.mark.parametrize("taught", [False, True], ids=["plain", "paired"])
async def test_requests_are_taken_away_from_a_server_that_hangs(taught):
    async with fleet(prefill=2, taught=taught) as made:
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


# ---------------------------------------------------------------------- clients


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_early_ends_both_requests(stream):
    async with fleet(taught=True) as made:
        (prefill,), (decode,) = made.prefill, made.decode
        prefill.gate = asyncio.Event()
        under_way = asyncio.create_task(made.post(COMPLETION | {"stream": stream}))
        to_prefill, to_decode = await prefill.request(0), await decode.request(0)
        under_way.cancel()
        await within(to_prefill.left)
        await within(to_decode.left)
        await eventually(lambda: made.router.status().outstanding == 0)
        assert all(one.outstanding == one.load_tokens == 0 for one in made.router.status().servers)
        await made.counted("kvbridge_router_requests_total", order="none", outcome="client_left")


async def test_a_client_that_leaves_before_prefill_has_answered_ends_it_in_plain_order():
    async with fleet() as made:
        made.prefill[0].gate = asyncio.Event()
        under_way = asyncio.create_task(made.post())
        received = await made.prefill[0].request(0)
        under_way.cancel()
        await within(received.left)
        assert made.decode[0].received == []


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it():
    async with fleet(taught=True) as made:
        never = asyncio.Event()
        made.decode[0].between = lambda number: never if number == 3 else None
        async with made.client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as answer:
            await asyncio.wait_for(anext(answer.aiter_raw()), WAIT_S)
            received = made.decode[0].received[0]
            assert not received.left.is_set()
        await within(received.left)
        await eventually(lambda: made.router.status().outstanding == 0)


async def test_more_requests_than_the_limit_are_refused_and_told_when_to_come_again():
    async with fleet(taught=True, limit=1) as made:
        made.prefill[0].gate = asyncio.Event()
        under_way = asyncio.create_task(made.post())
        await made.prefill[0].request(0)
        answer = await made.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        made.prefill[0].gate.set()
        assert (await under_way).status_code == 200
        assert (await made.post()).status_code == 200
        await made.counted("kvbridge_router_requests_total", order="none", outcome="over_limit")


async def test_an_answer_that_does_not_begin_in_time_is_given_up():
    async with fleet(taught=True, timeouts={"first_byte_s": 0.3}) as made:
        made.prefill[0].gate = asyncio.Event()
        answer = await made.post()
        assert answer.status_code == 504
        assert "timeouts.first_byte_s" in answer.json()["error"]["message"]
        for received in (*made.prefill[0].received, *made.decode[0].received):
            await within(received.left)


async def test_a_stream_that_stands_still_ends_with_an_error():
    async with fleet(taught=True, timeouts={"idle_s": 0.3}) as made:
        never = asyncio.Event()
        made.decode[0].between = lambda number: never if number == 2 else None
        content = await made.stream()
        assert b"timeouts.idle_s" in content
        await within(made.decode[0].received[0].left)


async def test_what_does_not_reach_a_server():
    async with fleet(http={"max_body_bytes": 1000}) as made:
        no_json = await made.client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert (no_json.status_code, no_json.json()["error"]["type"]) == (400, "invalid_input")
        assert (await made.post([1])).status_code == 400
        assert (await made.post(COMPLETION | {"prompt": "x" * 2000})).status_code == 413
        elsewhere = await made.client.post("/v1/embeddings", json={})
        assert (elsewhere.status_code, elsewhere.json()["code"]) == (404, "not_found")
        assert (await made.client.get("/v1/completions")).status_code == 405
        assert made.all_received("prefill") == made.all_received("decode") == []


async def test_models_are_those_of_a_decode_server():
    async with fleet() as made:
        assert (await made.client.get("/v1/models")).json() == {"data": [{"id": "d0"}]}
        await made.decode[0].stop()
        assert (await made.client.get("/v1/models")).status_code == 502


async def test_models_that_do_not_end_are_given_up_and_take_a_place_until_then():
    async with fleet(limit=1, timeouts={"health_s": 1.0}) as made:
        made.decode[0].drips_s = 0.05
        asking = asyncio.create_task(made.client.get("/v1/models"))
        await eventually(lambda: made.router.status().outstanding == 1)
        assert (await made.post()).status_code == 503
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "deadline")
        assert "timeouts.health_s" in answer.json()["error"]["message"]


async def test_a_header_that_no_server_could_be_sent_is_refused():
    async with fleet() as made:
        headers = [(b"X-Session-ID", b"caf\xe9")]
        for answer in (await made.client.get("/v1/models", headers=headers), await made.post(headers=headers)):
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_input")
            assert "x-session-id" in answer.json()["error"]["message"]
        assert (await made.post(headers={"X-Other": "caf\xe9".encode()})).status_code == 200


class Upload:
    """The body of a request that has not arrived whole before it may."""

    def __init__(self, first: bytes, rest: bytes) -> None:
        self.may_end = asyncio.Event()
        self._first, self._rest = first, rest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        await self.may_end.wait()
        yield self._rest


async def test_a_request_takes_its_place_before_its_body_is_there():
    """Bodies that arrive slowly are requests under way like any other."""
    async with fleet(limit=2) as made:
        content = json.dumps(COMPLETION).encode()
        uploads = [Upload(content[:10], content[10:]) for _ in range(2)]
        asking = [asyncio.create_task(made.client.post("/v1/completions", content=upload)) for upload in uploads]
        await eventually(lambda: made.router.status().outstanding == 2)
        refused = await made.post()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "(limit)" in refused.json()["error"]["message"]
        for upload in uploads:
            upload.may_end.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]
        await eventually(lambda: made.router.status().outstanding == 0)


async def test_long_bodies_have_a_limit_together_and_short_ones_are_read_all_the_same():
    async with fleet(limit_bytes=1 << 20, http={"max_body_bytes": 1 << 20}) as made:
        content = json.dumps(COMPLETION | {"prompt": "x" * 900_000}).encode()
        upload = Upload(content[:-1], content[-1:])
        asking = asyncio.create_task(made.client.post("/v1/completions", content=upload))
        await eventually(lambda: made.router._places.held_bytes > 500_000)
        refused = await made.client.post("/v1/completions", content=content)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "limit_bytes" in refused.json()["error"]["message"]
        assert (await made.post()).status_code == 200
        upload.may_end.set()
        assert (await asking).status_code == 200
        await eventually(lambda: made.router._places.held_bytes == 0)
        assert (await made.client.post("/v1/completions", content=content)).status_code == 200
        assert {len(one.body["prompt"]) for one in made.all_received("prefill")} == {900_000, len(COMPLETION["prompt"])}


async def test_a_body_that_would_take_many_times_its_length_is_refused():
    async with fleet() as made:
        content = b'{"prompt": [' + b"{}," * MOST_VALUES + b"{}]}"
        answer = await made.client.post("/v1/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_input")
        assert made.all_received("prefill") == []


async def test_a_busy_server_is_asked_again_elsewhere_and_the_last_one_tells_the_client():
    async with fleet(prefill=2) as made:
        made.prefill[0].status = 429
        assert (await made.post()).status_code == 200
        made.prefill[1].status = 429
        answer = await made.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize("url", ["http://h:99999999", "http://999.1.1.1:1", f"http://{'a' * 64}.b", "http://a..b"])
async def test_a_server_of_a_url_that_nobody_can_ask_is_out_and_is_asked_again(url):
    async with fleet(timeouts={"health_interval_s": 0.01}) as made:
        made.router.servers.use(Role.DECODE, [url, made.decode[0].url])
        made.router._health._watched.clear()
        made.router._health.follow()
        server = made.router.servers.of(Role.DECODE)[0]
        await eventually(lambda: server.failures > 1)
        assert "GET /health" in server.problem
        server.is_well()  # as if it had been
        assert (await made.post()).status_code == 200


async def test_headers_that_are_passed_on():
    given = {"authorization": "Bearer k", "x-request-id": "mine-1", "x-vllm-priority": "3", "cookie": "no"}
    async with fleet(taught=True) as made:
        answer = await made.post(headers=given)
        assert answer.headers["x-request-id"] == "mine-1"
        for received in (made.prefill[0].received[0], made.decode[0].received[0]):
            assert {key: received.headers.get(key) for key in given} == given | {"cookie": None}


async def test_a_router_with_a_token_asks_for_it(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("secret\n")
    async with fleet(http={"token_file": str(file)}) as made:
        assert (await made.post()).status_code == 401
        assert (await made.client.get("/v1/models")).status_code == 401
        assert (await made.client.get("/ready")).status_code == 200
        assert (await made.post(headers={"authorization": "Bearer secret"})).status_code == 200
        assert made.decode[0].received[0].headers["authorization"] == "Bearer secret"


# ---------------------------------------------------------------------- choice, operators, the end


async def test_a_long_prompt_keeps_others_away_from_its_server():
    async with fleet(prefill=2, decode=2, taught=True) as made:
        for server in made.prefill:
            server.gate = asyncio.Event()
        long = asyncio.create_task(made.post(COMPLETION | {"prompt": "x" * 10_000}))
        await made.prefill[0].request(0)
        short = [asyncio.create_task(made.post()) for _ in range(5)]
        await made.prefill[1].request(4)
        shown = {one.url: one for one in made.router.status().servers}
        assert shown[made.prefill[0].url].load_tokens > 2_000
        assert shown[made.prefill[1].url].outstanding == 5
        for server in made.prefill:
            server.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(long, *short)} == {200}


async def test_status_and_metrics_say_who_is_there():
    async with fleet(taught=True) as made:
        await made.post()
        shown = (await made.client.get("/status")).json()
        assert [(one["role"], one["problem"], one["paired"]) for one in shown["servers"]] == [
            ("prefill", "", True),
            ("decode", "", False),
        ]
        await made.counted("kvbridge_http_requests_total", route="/v1/completions", method="POST", code="200")
        page = (await made.client.get("/metrics")).text
        assert 'kvbridge_router_servers{role="decode",state="well"} 1.0' in page
        assert "kvbridge_ready 1.0" in page


async def test_an_ending_router_lets_answers_end_and_takes_no_more():
    async with fleet(taught=True) as made:
        made.prefill[0].gate = asyncio.Event()
        under_way = asyncio.create_task(made.stream())
        await made.prefill[0].request(0)
        draining = asyncio.create_task(made.router.drain())
        await eventually(lambda: not made.router.readiness().ready)
        assert (await made.post()).status_code == 503
        assert not draining.done()
        made.prefill[0].gate.set()
        assert await under_way == b"".join(made.decode[0].events())
        await asyncio.wait_for(draining, WAIT_S)


async def test_what_has_not_ended_in_time_is_told_why_it_ends():
    async with fleet(taught=True) as made:
        never = asyncio.Event()
        made.decode[0].between = lambda number: never if number == 3 else None
        async with made.client.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as answer:
            pieces = answer.aiter_raw()
            content = await asyncio.wait_for(anext(pieces), WAIT_S)
            closing = asyncio.create_task(made.router.close())
            content += b"".join([piece async for piece in pieces])
        assert b"the router is ending" in content
        await within(made.decode[0].received[0].left)
        await asyncio.wait_for(closing, WAIT_S)


# ---------------------------------------------------------------------- the directory


async def test_servers_come_from_the_directory_where_nodes_tell_their_engines():
    bootstrap = BootstrapDaemon(
        BootstrapConfig.model_validate({"http": {"port": 0}, "directory": {"expire_after_s": 3600}})
    )
    await bootstrap.start()
    try:
        async with fleet(2, 1, bootstrap={"url": bootstrap.url}) as made:
            router, nodes = made.router, FleetOfNodes(pairs=2)
            assert "the directory has no prefill instance" in router.readiness().reasons[0]
            for role, servers in {Role.PREFILL: made.prefill, Role.DECODE: made.decode}.items():
                for number, server in enumerate(servers):
                    told = nodes.registration(role, number).model_copy(update={"engine_url": f"{server.url}/"})
                    await bootstrap.directory.register(told)
            # Its engine is told of nowhere, so no request goes there.
            await bootstrap.directory.register(nodes.registration(Role.DECODE, 1))
            await router._directory.look()
            await made.look()
            assert [one.url for one in router.servers.of(Role.PREFILL)] == [one.url for one in made.prefill]
            assert [one.url for one in router.servers.of(Role.DECODE)] == [made.decode[0].url]
            assert (await made.post()).status_code == 200

            listed = (await made.client.get(f"{bootstrap.url}/v1/instances")).json()
            assert {one["instance"]: one["nodes"][0]["engine_url"] for one in listed} == {
                "prefill-0": f"{made.prefill[0].url}/",
                "prefill-1": f"{made.prefill[1].url}/",
                "decode-0": f"{made.decode[0].url}/",
                "decode-1": "",
            }
            gone = nodes.registration(Role.PREFILL, 0)
            await bootstrap.directory.deregister(gone.instance, gone.node, gone.incarnation)
            await router._directory.look()
            assert [one.url for one in router.servers.of(Role.PREFILL)] == [made.prefill[1].url]

            await bootstrap.close()
            await router._directory.look()
            assert (await made.post()).status_code == 200
            assert bootstrap.url in router.status().directory_problem
            assert router.readiness().ready
    finally:
        await bootstrap.close()
