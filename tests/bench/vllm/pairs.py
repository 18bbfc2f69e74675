"""The servers that are measured: one prefill and one decode server for each connector, and how they are asked.

Both pairs run at the same time on the same cores, and only one of them has anything to do. NixlConnector is eased (see
`tests/vllm/eased`): as it comes, its progress thread alone takes a core of a machine that has two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import httpx

from tests.vllm.servers import ANSWER_S, Pair, Plan, Server, Setup, kvbridge, nixl_plan

CONNECTORS = ("kvbridge", "nixl")
TIMED = Path(__file__).parent / "timed"
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Shape:
    """What both pairs are."""

    model: str
    cache_gib: int
    """Of decode; prefill has 1 GiB."""
    chunk_tokens: int
    """Prefill computes so many tokens at a time."""


@dataclass(frozen=True)
class LoadTimes:
    """What `timed_connectors` writes in one server."""

    path: Path

    def files(self) -> list[Path]:
        """Return a file for each process."""
        return list(self.path.parent.glob(f"{self.path.name}.*"))

    def between(self, begun_s: float, ended_s: float) -> list[float]:
        """Return the seconds of the loads that began in a while, in the order in which they began."""
        rows = sorted(json.loads(line) for file in self.files() for line in file.read_text().splitlines())
        return [seconds for at_s, seconds in rows if begun_s <= at_s < ended_s]


@dataclass
class Measured:
    """One connector's servers."""

    pair: Pair
    loads: LoadTimes
    """Of decode."""

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both."""
        return self.pair.prefill, self.pair.decode


Pairs = dict[str, Measured]
"""By connector."""


def plan(shape: Shape, connector: str, role: str, work: Path) -> tuple[Plan, LoadTimes]:
    """Return a server and where its load times go. Those of former runs are removed."""
    title, side = f"{connector}-{shape.model}-{role}", "producer" if role == "prefill" else "consumer"
    loads = LoadTimes(work / f"{title}.loads")
    for old in loads.files():
        old.unlink()
    ours = Plan(title, kvbridge(side, transports={"order": ["nixl"]}))
    found = nixl_plan(title, side) if connector == "nixl" else ours
    paths = [str(TIMED), str(ROOT), *filter(None, [found.environment.get("PYTHONPATH")])]
    environment = {
        **found.environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "LOAD_TIMES": str(loads.path),
        "VLLM_CPU_KVCACHE_SPACE": str(shape.cache_gib if role == "decode" else 1),
    }
    transfer = {**(found.transfer or {}), "kv_connector_module_path": "timed_connectors"}
    chunk = ("--max-num-batched-tokens", str(shape.chunk_tokens)) if role == "prefill" else ()
    more = {"shape": shape.model, "dtype": "bfloat16", "arguments": (*found.arguments, *chunk)}
    return replace(found, transfer=transfer, environment=environment, **more), loads


@contextmanager
def started(setup: Setup, shape: Shape) -> Iterator[Pairs]:
    """Start all servers of one shape at once; they end with the context."""
    with ExitStack() as stack:
        found: list[tuple[Server, LoadTimes]] = []
        for connector, role in product(CONNECTORS, ("prefill", "decode")):
            planned, loads = plan(shape, connector, role, setup.directory)
            server = Server(setup, planned)
            stack.callback(server.end)
            found.append((server, loads))
        for server, _ in found:
            server.wait_ready()
        sides = zip(CONNECTORS, found[::2], found[1::2], strict=True)
        yield {name: Measured(Pair(prefill, decode), loads) for name, (prefill, _), (decode, loads) in sides}


def forget(server: Server) -> None:
    """Have a server forget its prefix cache (in its development mode)."""
    url = f"http://127.0.0.1:{server.port}/reset_prefix_cache"
    httpx.post(url, timeout=ANSWER_S, trust_env=False).raise_for_status()
