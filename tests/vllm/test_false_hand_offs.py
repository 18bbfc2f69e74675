"""A false hand-off ends in the right tokens or in an error. What NixlConnector does with it is in the table, and not asserted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.false_hand_offs import (
    RIGHT,
    conditions,
    kvbridge_connector,
    nixl_connector,
    nixl_fleet_plans,
    page,
    try_all,
    versions,
)
from tests.vllm.fleet import Fleet
from tests.vllm.servers import Setup


@pytest.fixture
def both(fleet: Fleet, setup: Setup) -> Iterator[Fleet]:
    """The suite's servers and two with NixlConnector, which are gone after it."""
    plans = nixl_fleet_plans()
    fleet.add(plans)
    yield fleet
    fleet.remove([plan.name for plan in plans])


def test_false_hand_offs(both: Fleet, setup: Setup, say: list[str]) -> None:
    rows = try_all(both, [kvbridge_connector(), nixl_connector()])
    written = setup.directory / "false-hand-offs.md"
    written.write_text(page(rows, conditions(versions(setup))))
    say.extend(f"false hand-off: {row.told} | {row.asked} | {row.got}" for row in rows)
    wrong = [row for row in rows if row.got["kvbridge"] != RIGHT and not row.answers["kvbridge"].is_error]
    ended = [row for row in rows if "ends" in row.got["kvbridge"]]
    assert not wrong, wrong
    assert not ended, ended


def test_false_hand_offs_where_decode_computes_again(fleet: Fleet, say: list[str]) -> None:
    rows = try_all(fleet, [kvbridge_connector("mooncake")])
    assert {row.got["kvbridge"] for row in rows} == {RIGHT}, rows
