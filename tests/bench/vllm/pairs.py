"""The measured servers: prefill and decode for each connector, on the same cores; and the times that their hooks have written."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Self

from tests.bench.output import percentile
from tests.engines.servers import Setup
from tests.vllm.servers import Pair, Plan, Server, kvbridge, nixl_plan

CONNECTORS = ("kvbridge", "nixl")
TIMED = Path(__file__).parent / "timed"
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Shape:
    model: str
    cache_gib: int
    chunk_tokens: int


@dataclass
class Measured:
    connector: str
    pair: Pair
    hooks: dict[str, HookTimes]

    @property
    def servers(self) -> tuple[Server, Server]:
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
        servers, self._servers = self._servers, []
        for server in servers:
            server.end()


@dataclass(frozen=True)
class Row:
    """See `timed_connectors`. Times are of the host's monotonic clock, in seconds."""

    at_s: float
    what: str
    seconds: float
    request: str


@dataclass(frozen=True)
class HookTimes:
    """The rows of one server. Its processes append while it runs; the last ones come when it ends."""

    path: Path

    def rows(self) -> list[Row]:
        files = self.path.parent.glob(f"{self.path.name}.*")
        return sorted((row for file in files for row in _rows(file)), key=lambda row: row.at_s)

    def loads(self, begun_s: float, ended_s: float) -> list[Row]:
        return [row for row in self.rows() if row.what == "load" and begun_s <= row.at_s < ended_s]

    def steps_ms(self, begun_s: float, ended_s: float) -> list[float]:
        return [1e3 * row.seconds for row in self.rows() if row.what == "step" and begun_s <= row.at_s < ended_s]

    def requests_ms(self, spans: list[tuple[float, float]], usual_step_s: float) -> list[float]:
        """Return what all hooks of each request took in its span: those that name it, and its steps beyond usual ones."""
        rows = self.rows()
        found = []
        for begun_s, ended_s in spans:
            by_kind: dict[bool, list[Row]] = defaultdict(list)
            for row in rows:
                if begun_s <= row.at_s < ended_s and row.what != "load":
                    by_kind[row.what == "step"].append(row)
            if by_kind:
                steps = sum(max(0.0, row.seconds - usual_step_s) for row in by_kind[True])
                found.append(1e3 * (steps + sum(row.seconds for row in by_kind[False])))
        return found


def _rows(file: Path) -> Iterator[Row]:
    for line in file.read_text().splitlines():
        yield Row(*json.loads(line))


def summary(values: list[float]) -> dict[str, float]:
    found = {"median": median(values), "p99": percentile(values, 99), "min": min(values), "max": max(values)}
    return found | {"count": len(values)}
