"""What metrics and logs cost a room, each part alone; all of it together, under load, is measured by bench_watching.

- `room_us`: processor time from the first fact of a small room to its last, through all readers of a node; at the log's rate of
  writing (10 rooms a second are written, the others are counted), and as if each were written. `budget_us` is what 5 % of the
  processor time of a room would be (both daemons together, docs/performance.md).
- `request_us`: what an HTTP request's id and count add to it; a room takes three, one on each daemon.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.states import RoomState
from kvbridge.http.middleware import Observed
from kvbridge.telemetry.events import Fact, OrderBegan, OrderEnded, PeerAccepted, PhasesEnded, RankReceived, RoomEntered
from kvbridge.telemetry.logs import LINES, Seldom, configure_logs
from kvbridge.telemetry.phases import PHASES
from kvbridge.telemetry.readers import LogReader, MetricsReader, PeerNames
from kvbridge.telemetry.recent import StatusReader
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.stream import EventStream
from kvbridge.telemetry.timelines import RoomTimelines

ROOMS, PEERS, REPEATS = 1_000, 200, 7
ROOM_CPU_MS = 5.0
"""Of all processes that a room without payload passes (docs/performance.md, measured by bench_load)."""
BUDGET = 0.05
RANK = Rank(pp=0, tp=0)
AMOUNTS = {kind: Amount(lane_rows=100, bytes=58_400, operations=4) for kind in list(ComponentKind)[:6]}


def facts_of_a_room(number: int) -> dict[str, list[Fact]]:
    """What happens to one small room, on each side."""
    room: Any = {"room": number, "generation": 1, "peer": f"peer-{number % PEERS}"}
    about: Any = {"age_s": 0.1, "prompt_tokens": 256, "ids": {"request_id": "9958cceab24d35ef"}}
    order: Any = {"rank": RANK, "order": number, "transport": "local"}

    def entered(*states: RoomState) -> list[Fact]:
        return [RoomEntered(**room, state=state, **about) for state in states]

    return {
        "prefill": [
            *entered(RoomState.ADMITTED, RoomState.TRANSFERRING),
            OrderBegan(**room, **order),
            OrderEnded(**room, **order, amounts=AMOUNTS),
            PhasesEnded(**room, phases_s=dict.fromkeys(PHASES["prefill"], 0.01)),  # type: ignore[index]
            *entered(RoomState.COMPLETED),
        ],
        "decode": [
            *entered(RoomState.ADMITTED, RoomState.OFFERED, RoomState.TRANSFERRING),
            RankReceived(**room, rank=RANK, amounts=AMOUNTS, transport="local", under_way_ago_s=((0.02, 0.01),)),
            PhasesEnded(**room, phases_s=dict.fromkeys(list(PHASES["decode"])[:5], 0.01)),  # type: ignore[index]
            *entered(RoomState.COMMITTED),
            PhasesEnded(**room, phases_s={"commit_to_claim": 0.01, "admit_to_claim": 0.1}),
            *entered(RoomState.CLAIMED),
            PhasesEnded(**room, phases_s={"claim_to_release": 0.01}),
            *entered(RoomState.COMPLETED),
        ],
    }


def stream(role: str, *, lines: int) -> EventStream:
    """The stream of a node with all readers, `lines` of rooms that ended a second."""
    names, metrics = PeerNames(), Metrics(role=role)
    log = LogReader(names, Seldom(metrics.line_left_out, lines=lines))
    made = EventStream()
    for reader in (names, MetricsReader(metrics, names), log, StatusReader(), RoomTimelines()):
        made.add_reader(reader.table)
    for number in range(PEERS):
        made.emit(PeerAccepted(peer=f"peer-{number}", name=f"node-{number}/n", features=()))
    return made


def room_us(role: str, *, lines: int) -> float:
    """Microseconds a room, the best of some runs."""
    best = float("inf")
    rooms = [facts_of_a_room(number)[role] for number in range(ROOMS)]
    for _ in range(REPEATS):
        made = stream(role, lines=lines)
        begun_s = time.process_time()
        for facts in rooms:
            for fact in facts:
                made.emit(fact)
        best = min(best, time.process_time() - begun_s)
    return best / ROOMS * 1e6


def request_us(repeats: int = REPEATS) -> float:
    """Microseconds a request, the best of some runs."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        scope["route"] = None
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def unheard(_message: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.request"}

    async def measured(app: ASGIApp) -> float:
        begun_s = time.process_time()
        for _ in range(ROOMS):
            await app({"type": "http", "method": "POST", "path": "/v1/requests", "headers": []}, receive, unheard)
        return (time.process_time() - begun_s) / ROOMS * 1e6

    metrics = Metrics(role="decode")
    observed = Observed(answer, answered=metrics.answered, traceparent_ignored=metrics.traceparent_ignored)
    runs = [(asyncio.run(measured(observed)), asyncio.run(measured(answer))) for _ in range(repeats)]
    return min(each for each, _ in runs) - min(each for _, each in runs)


def run() -> dict[str, Any]:
    """Return what `table` shows."""
    configure_logs(names={"role": "bench", "instance": "i", "node": "n"}, form="json", stream=io.StringIO())
    measured: Callable[[int], dict[str, float]] = lambda lines: {  # noqa: E731 - twice the same
        role: room_us(role, lines=lines) for role in ("prefill", "decode")
    }
    sampled, written = measured(LINES), measured(1 << 40)
    return {
        "room_us": sampled,
        "room_us_each_written": written,
        "request_us": request_us(),
        "budget_us": ROOM_CPU_MS * 1e3 * BUDGET,
    }


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = ["metrics and logs, microseconds a room (both sides), and as if each room had its line:"]
    for name in ("room_us", "room_us_each_written"):
        sides = ", ".join(f"{role} {microseconds:.0f}" for role, microseconds in found[name].items())
        together = sum(found[name].values()) + 3 * found["request_us"]
        lines.append(
            f"  {name}: {sides}, three requests {3 * found['request_us']:.0f}; together {together:.0f} "
            f"(budget {found['budget_us']:.0f})"
        )
    return "\n".join(lines)
