"""A fleet on virtual time: what few draws cost against looking at everybody, and that deaths and restarts are got over."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest
import structlog

from kvbridge.bootstrap import looks
from kvbridge.cli.trace import TraceRequest
from kvbridge.core.ids import Role
from tests.helpers.fleet_simulation import Fleet, Outcome, Simulation

pytestmark = pytest.mark.asyncio

INSTANCES, SECONDS = 40, 12.0
COPIES_PER_INSTANCE = 0.17
"""Users of the trace for each instance; two thirds of decode's pages are then in use."""


def overlaid(trace: Sequence[TraceRequest], *, copies: int, seconds: float) -> list[tuple[float, TraceRequest]]:
    """The arrivals of so many users: each copy is `seconds` of the trace from another moment on, at the trace's own speed."""
    whole_s = trace[-1].timestamp / 1e3
    times_s = [one.timestamp / 1e3 for one in trace]
    found: list[tuple[float, TraceRequest]] = []
    for copy in range(copies):
        begun_s = copy * (whole_s - seconds) / max(1, copies - 1)
        found += [
            (at_s - begun_s, one)
            for at_s, one in zip(times_s, trace, strict=True)
            if begun_s <= at_s < begun_s + seconds
        ]
    return sorted(found, key=lambda pair: pair[0])


def made_up(count: int = 4000) -> tuple[TraceRequest, ...]:
    """Requests as a trace has them: three a second, most of them short, few of them very long."""
    chance = random.Random(1)
    now_ms, found = 0.0, []
    for _ in range(count):
        now_ms += chance.expovariate(1 / 300)
        prompt = min(120_000, int(chance.lognormvariate(8.8, 1.1)) + 1)
        output = int(chance.expovariate(1 / 350))
        found.append(TraceRequest(timestamp=now_ms, input_length=prompt, output_length=output))
    return tuple(found)


@pytest.fixture(autouse=True)
def quiet():
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


async def simulated(*, all_seeing: bool = False, load: float = 1.0, **changes) -> tuple[Simulation, Outcome]:
    copies = round(INSTANCES * COPIES_PER_INSTANCE * load)
    simulation = Simulation(Fleet(INSTANCES, **changes), all_seeing=all_seeing)
    return simulation, await simulation.run(overlaid(made_up(), copies=copies, seconds=SECONDS))


async def test_few_draws_balance_nearly_as_well_as_looking_at_everybody():
    _, ours = await simulated()
    _, best = await simulated(all_seeing=True)
    found, all_seen = ours.summary(), best.summary()
    assert found["requests"] > 200
    assert found["wait_mean_s"] < all_seen["wait_mean_s"] + 0.05
    assert found["refused_full"] + found["refused_needlessly"] < 0.02
    for role in Role:
        assert found[f"{role}_deviation"] < 1.5 * all_seen[f"{role}_deviation"]


async def test_one_draw_would_not_do(monkeypatch):
    """So that the comparison above can fail."""
    monkeypatch.setattr(looks, "DRAWN", (1, 64))
    _, ours = await simulated()
    _, best = await simulated(all_seeing=True)
    assert ours.summary()["wait_mean_s"] > best.summary()["wait_mean_s"] + 0.1


async def test_deaths_and_restarts_cost_their_rooms_and_little_else():
    simulation, outcome = await simulated(dies_each_s=4.0, drained_each_s=2.0)
    found = outcome.summary()
    assert outcome.lost, "instances did die"
    assert any(one.life for one in simulation.daemons.values())
    assert found["refused_full"] + found["refused_needlessly"] < 0.03
    for one in simulation.daemons.values():
        assert one.free == one.pages - sum(one.rooms.values()) >= 0


async def test_a_fleet_that_is_asked_for_too_much_refuses_no_more_than_if_it_looked_at_everybody():
    simulation, ours = await simulated(load=2.0)
    _, best = await simulated(load=2.0, all_seeing=True)
    assert best.refused.total() > 20
    assert ours.paired > 0.95 * best.paired
    for one in simulation.daemons.values():
        assert one.free == one.pages - sum(one.rooms.values()) >= 0
