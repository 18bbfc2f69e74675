"""Many rooms through one pair of real daemons, admitted by bootstrap, by both daemons or by prefill's engine."""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from kvbridge.cli.local_cluster import Cluster, DaemonProcess
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import ROOM_BITS
from kvbridge.processes import child_environment
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.bench.load_engine import NUMBER_BITS, Facts
from tests.helpers.live_rooms import control_of

WAYS = ("bootstrap", "daemons", "engine")
ROOM_LIMIT_S = 30.0
PIPE_BYTES = 1 << 20


class RefusedError(Exception):
    def __init__(self, status: int, code: str, retry_after_s: float) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


class RoomLostError(Exception):
    """A room that was admitted did not come through."""


class Endpoint:
    """HTTP/1.1 over kept connections, as little of it as POST with JSON needs: the generator shares cores with what it measures."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a 201. Raises RefusedError, OSError."""
        return await self._call("POST", path, body)

    async def give_back(self, room: int) -> None:
        with contextlib.suppress(RefusedError):
            await self._call("DELETE", f"/v1/requests/{room}", {})

    async def _call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        content = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        while self._idle:
            try:
                return await self._exchange(self._idle.pop(), request)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                if getattr(error, "partial", b""):
                    raise  # an answer had begun; else the server had closed a connection that was idle for too long
        return await self._exchange(await asyncio.open_connection(self._host, self._port), request)

    async def _exchange(
        self, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
    ) -> dict[str, Any]:
        reader, writer = connection
        try:
            writer.write(request)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
            answer = await reader.readexactly(int(headers.get("content-length", 0)))
        except BaseException:
            writer.close()
            raise
        if headers.get("connection", "").lower() == "close":
            writer.close()
        else:
            self._idle.append(connection)
        status = int(lines[0].split()[1])
        if status not in {200, 201}:
            problem = json.loads(answer) if answer.startswith(b"{") else {}
            raise RefusedError(status, str(problem.get("code", "")), float(problem.get("retry_after_s") or 1.0))
        return dict(json.loads(answer))

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def identity_of(model: str) -> PrefixIdentity:
    geometry = preset(model)
    named = {"model": model, "revision": "1", "fingerprint": fingerprint(geometry)}
    return PrefixIdentity(**named, tokens_per_page=geometry.tokens_per_page)


@dataclass
class Life:
    total_s: float
    phases_s: dict[str, float]
    """With `admission` and `total`."""
    amounts: dict[str, list[int]]
    """Bytes and operations of each component."""
    checked_bytes: int
    held: dict[str, int]
    """Tokens of its prompt that either side held, and of these what came back from host memory."""

    @property
    def payload_bytes(self) -> int:
        return sum(moved for moved, _ in self.amounts.values())


@dataclass
class Load:
    cluster: Cluster
    facts: Facts
    identity: PrefixIdentity | None
    bootstrap: Endpoint
    prefill: Endpoint
    decode: Endpoint
    control: dict[str, Any]
    engines: list[asyncio.subprocess.Process] = field(default_factory=list)
    _waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._prompts = self.facts.prompts_by_number()

    def keys(self, number: int) -> Keys:
        if self._prompts is None or self.identity is None:
            return Keys()
        return page_keys(self.identity, self._prompts(number))

    async def room(self, way: str, number: int, tokens: int, *, limit_s: float = ROOM_LIMIT_S, **more: Any) -> Life:
        """Take one room through its life. Raises RefusedError when it is not admitted, RoomLostError when it fails afterwards."""
        begun_s = time.perf_counter()
        body: dict[str, Any] = {"prompt_tokens": tokens, **more}
        room = (secrets.randbits(ROOM_BITS - NUMBER_BITS) << NUMBER_BITS) + number
        if self._prompts is not None:
            body |= {"room": room, "page_hashes": base64.b64encode(self.keys(number).data).decode()}
        if way == "bootstrap":
            room = int((await self.bootstrap.post("/v1/requests", body))["room"])
        else:
            if way == "daemons":
                await self.prefill.post("/v1/requests", {**body, "room": room})
            try:
                await self.decode.post("/v1/requests", {**body, "room": room, "prefill": [self.control]})
            except RefusedError:
                if way == "daemons":
                    await self.prefill.give_back(room)
                raise
        admission_s = time.perf_counter() - begun_s
        ended = self._waiting[room] = asyncio.get_running_loop().create_future()
        stdin = self.engines[0].stdin
        assert stdin is not None
        stdin.write(f"{room} {tokens} {int(way == 'engine')}\n".encode())
        try:
            fact = await asyncio.wait_for(ended, limit_s)
        except TimeoutError:
            raise RoomLostError(f"room {room} was not released within {limit_s:g} s") from None
        finally:
            self._waiting.pop(room, None)
        if fact.get("code") == "capacity" and way == "engine":
            await self.decode.give_back(room)
            raise RefusedError(503, "capacity", 1.0)
        if "error" in fact:
            raise RoomLostError(f"{fact['code']}: {fact['error']}")
        total_s = time.perf_counter() - begun_s
        phases_s = {"admission": admission_s, **fact["phases_s"], "total": total_s}
        return Life(total_s, phases_s, fact["amounts"], fact["checked_bytes"], fact["held"])

    def rest(self) -> None:
        """Close idle connections, so that those who count sockets count none of ours."""
        for endpoint in (self.bootstrap, self.prefill, self.decode):
            endpoint.close()

    def processes(self) -> list[tuple[str, psutil.Process, DaemonProcess]]:
        found = []
        daemons = self.cluster.bootstrap, self.cluster.prefill, self.cluster.decode
        for name, daemon in zip(("bootstrap", "prefill", "decode"), daemons, strict=True):
            assert daemon.process is not None
            process = psutil.Process(daemon.process.pid)
            found.append((name, process, daemon))
            found += [(f"{name} worker {number}", child, daemon) for number, child in enumerate(process.children())]
        return found

    async def _listen(self, engine: asyncio.subprocess.Process) -> None:
        assert engine.stdout is not None
        async for line in engine.stdout:
            fact = json.loads(line)
            waiting = self._waiting.get(fact.get("room", 0))
            if waiting is not None and not waiting.done():
                waiting.set_result(fact)


@asynccontextmanager
async def load(cluster: Cluster, facts: Facts, identity: PrefixIdentity | None = None) -> AsyncIterator[Load]:
    """Attach engines to a running pair; they end with the context. `identity`: of the model, where rooms have prompts."""
    endpoints = [Endpoint(daemon.url) for daemon in (cluster.bootstrap, cluster.prefill, cluster.decode)]
    running = Load(cluster, facts, identity, *endpoints, control=control_of(cluster.prefill))
    async with AsyncExitStack() as stack:
        stack.callback(running.rest)
        for role, daemon in (("prefill", cluster.prefill), ("decode", cluster.decode)):
            engine = await _start(role, str(daemon.runtime_dir), facts)
            stack.push_async_callback(_end, engine)
            running.engines.append(engine)
        for engine in running.engines:
            assert engine.stdout is not None
            assert json.loads(await engine.stdout.readline()) == {"ready": True}
            listener = asyncio.create_task(running._listen(engine))
            stack.callback(listener.cancel)
        yield running


async def _start(role: str, runtime_dir: str, facts: Facts) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "tests.bench.load_engine", role, runtime_dir, json.dumps(asdict(facts))]
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, env=child_environment(os.environ), limit=PIPE_BYTES
    )


async def _end(engine: asyncio.subprocess.Process) -> None:
    assert engine.stdin is not None
    engine.stdin.close()
    try:
        await asyncio.wait_for(engine.wait(), 5.0)
    except TimeoutError:
        engine.kill()
        await engine.wait()
