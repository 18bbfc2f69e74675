"""The router for its clients and its operators: limits, refusals, headers, its end, the directory."""

import asyncio
import json
from collections.abc import AsyncIterator

from kvbridge.config.schema import BootstrapConfig
from kvbridge.core.ids import Role
from kvbridge.daemon.bootstrap import BootstrapDaemon
from tests.helpers.fleet import Fleet as FleetOfNodes
from tests.helpers.openai_servers import WAIT_S
from tests.integration.router.fleet import COMPLETION, eventually, fleet, within


async def test_a_client_that_leaves_early_ends_both_requests():
    async with fleet(taught=True) as made:
        (prefill,), (decode,) = made.prefill, made.decode
        prefill.gate = asyncio.Event()
        under_way = asyncio.create_task(made.post(COMPLETION | {"stream": True}))
        to_prefill, to_decode = await prefill.request(0), await decode.request(0)
        under_way.cancel()
        await within(to_prefill.left)
        await within(to_decode.left)
        await eventually(lambda: made.router.status().outstanding == 0)
        assert all(one.outstanding == one.load_tokens == 0 for one in made.router.status().servers)
        await made.counted("kvbridge_router_requests_total", order="none", outcome="client_left")


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
        await eventually(lambda: made.router.router._held_bytes > 500_000)
        refused = await made.client.post("/v1/completions", content=content)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "limit_bytes" in refused.json()["error"]["message"]
        assert (await made.post()).status_code == 200
        upload.may_end.set()
        assert (await asking).status_code == 200
        await eventually(lambda: made.router.router._held_bytes == 0)
        assert (await made.client.post("/v1/completions", content=content)).status_code == 200
        assert {len(one.body["prompt"]) for one in made.all_received("prefill")} == {900_000, len(COMPLETION["prompt"])}


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


async def test_servers_come_from_the_directory_where_nodes_tell_their_engines():
    settings = {"http": {"port": 0}, "directory": {"expire_after_s": 3600}}
    bootstrap = BootstrapDaemon(BootstrapConfig.model_validate(settings))
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
            await router.servers.read_directory()
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
            await router.servers.read_directory()
            assert [one.url for one in router.servers.of(Role.PREFILL)] == [made.prefill[1].url]

            await bootstrap.close()
            await router.servers.read_directory()
            assert (await made.post()).status_code == 200
            assert bootstrap.url in router.status().directory_problem
            assert router.readiness().ready
    finally:
        await bootstrap.close()
