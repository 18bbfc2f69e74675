"""A router and its servers in one loop, each on a real socket, and a client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from kvbridge.config.schema import RouterConfig
from kvbridge.core.ids import Role
from kvbridge.daemon.router import RouterDaemon
from tests.helpers.openai_servers import ADDRESSES, WAIT_S, HeldRooms, OpenAiServer, Received

COMPLETION = {"model": "m", "prompt": "How do you do?", "max_tokens": 3}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "How do you do?"}], "max_completion_tokens": 3}


class Fleet:
    def __init__(self, prefill: int, decode: int, connector: str) -> None:
        self.rooms = HeldRooms()
        self.prefill = [OpenAiServer(self.rooms, name=f"p{number}", connector=connector) for number in range(prefill)]
        self.decode = [OpenAiServer(self.rooms, name=f"d{number}") for number in range(decode)]
        if connector == "sglang":
            for mode, servers in (("prefill", self.prefill), ("decode", self.decode)):
                for server in servers:
                    server.info = {"disaggregation_mode": mode, "disaggregation_bootstrap_port": 8998}
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
                await self.router.servers.look(server)

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
    http = {"port": 0} | config.pop("http", {})
    settings = {**({} if "bootstrap" in config else named), "http": http, "timeouts": timeouts, **config}
    made.router = RouterDaemon(RouterConfig.model_validate(settings))
    try:
        await made.router.start()
        await made.router.servers.close()  # from now on it is the test that has it asked
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
