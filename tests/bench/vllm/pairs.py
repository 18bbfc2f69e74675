"""The servers that are measured: one prefill and one decode server for each connector, and how they are asked.

Both pairs run at the same time on the same cores, and only one of them has anything to do. NixlConnector is eased (see
`tests/vllm/eased`): as it comes, its progress thread alone takes a core of a machine that has two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tests.bench.vllm.hooks import HookTimes
from tests.vllm.servers import Pair, Plan, Server, Setup, kvbridge, nixl_plan

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


@dataclass
class Measured:
    """One connector's servers."""

    connector: str
    pair: Pair
    hooks: dict[str, HookTimes]
    """Of `prefill` and `decode`."""

    @property
    def servers(self) -> tuple[Server, Server]:
        """Both."""
        return self.pair.prefill, self.pair.decode


def plans(shape: Shape, work: Path) -> list[tuple[str, str, Plan, HookTimes]]:
    """Return connector, role, server and where its hook times go, of each server. Those of former runs are removed."""
    found = []
    for connector in CONNECTORS:
        for role, name in (("producer", "prefill"), ("consumer", "decode")):
            title = f"{connector}-{shape.model}-{name}"
            hooks = HookTimes(work / f"{title}.hooks")
            for old in work.glob(f"{hooks.path.name}.*"):
                old.unlink()
            ours = Plan(title, kvbridge(role, transports={"order": ["nixl"]}))
            plan = nixl_plan(title, role) if connector == "nixl" else ours
            paths = [str(TIMED), str(ROOT), *filter(None, [plan.environment.get("PYTHONPATH")])]
            environment = {
                **plan.environment,
                "PYTHONPATH": os.pathsep.join(paths),
                "HOOK_TIMES": str(hooks.path),
                "VLLM_CPU_KVCACHE_SPACE": str(shape.cache_gib if name == "decode" else 1),
            }
            transfer = {**(plan.transfer or {}), "kv_connector_module_path": "timed_connectors"}
            chunk = ("--max-num-batched-tokens", str(shape.chunk_tokens)) if name == "prefill" else ()
            more = {"shape": shape.model, "dtype": "bfloat16", "arguments": (*plan.arguments, *chunk)}
            plan = replace(plan, transfer=transfer, environment=environment, **more)
            found.append((connector, name, plan, hooks))
    return found


class Pairs:
    """All servers of one shape, started at once; a context."""

    def __init__(self, setup: Setup, shape: Shape) -> None:
        self._setup = setup
        self._shape = shape
        self._servers: list[Server] = []
        self.by_name: dict[str, Measured] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def _start(self) -> None:
        found: dict[str, dict[str, tuple[Server, HookTimes]]] = {}
        for connector, role, plan, hooks in plans(self._shape, self._setup.directory):
            server = Server(self._setup, plan)
            self._servers.append(server)
            found.setdefault(connector, {})[role] = (server, hooks)
        for server in self._servers:
            server.wait_ready()
        for connector, roles in found.items():
            self.by_name[connector] = Measured(
                connector,
                Pair(roles["prefill"][0], roles["decode"][0]),
                {role: hooks for role, (_, hooks) in roles.items()},
            )

    def __exit__(self, *raised: object) -> None:
        self.end()

    def end(self) -> None:
        """End all; hook times are whole then."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.end()
