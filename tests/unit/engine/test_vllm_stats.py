"""Counts of transfers on their way to vLLM's log line and metrics; and of which nodes a rank says that it is through with them."""

from __future__ import annotations

import json

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.vllm.stats import TransferStats, add_counts, is_nothing, no_counts, summary


def event(kind: str, code: str = "", size: int = 0, seconds: float = 0.0) -> RoomEvent:
    amounts = {ComponentKind.MHA_KV: Amount(bytes=size, operations=3)} if size else {}
    return RoomEvent(room=1, generation=1, kind=kind, code=code, amounts=amounts, phases_s={"offer_to_commit": seconds})


def test_what_happened_is_told_once_and_what_is_held_as_it_is() -> None:
    stats = TransferStats()
    assert stats.take() is None
    stats.heard([event("wanted"), event("committed", size=1 << 20, seconds=0.5), event("failed", "unknown_room")])
    stats.held("a", 4)
    stats.held("b", 2)
    first = stats.take()
    assert first is not None
    assert stats.take() is None
    stats.let_go(["a", "somebody"])
    stats.heard([event("completed"), event("failed", "unknown_room"), event("refused")])
    second = stats.take()
    assert second is not None
    assert json.loads(json.dumps(first)) == first
    assert (first["held_rooms"], first["held_blocks"], second["held_rooms"], second["held_blocks"]) == (2, 6, 1, 2)
    both = summary(add_counts(first, second))
    assert (both["Loads"], both["Avg load time (ms)"], both["MB"], both["Operations"], both["Sent"]) == (
        1,
        500,
        1.049,
        3,
        1,
    )
    assert (both["Held blocks"], both["Failed (unknown_room)"], both["Failed (refused)"]) == (2, 2, 1)


def test_that_nothing_is_held_any_more_is_something_and_is_not_forgotten_for_counts_that_do_not_know() -> None:
    """What is shown as held stays as it was said last, so that its end has to be said."""
    stats = TransferStats()
    stats.held("a", 4)
    stats.take()
    stats.let_go(["a"])
    last = stats.take()
    assert last is not None
    assert not is_nothing(last)
    assert (last["held_rooms"], last["held_blocks"]) == (0, 0)
    stats.held("b", 2)
    held = stats.take()
    stats.failed("internal")
    of_a_worker = stats.take(holds=False)
    assert held is not None
    assert of_a_worker is not None
    both = add_counts(held, of_a_worker)
    assert (both["held_rooms"], both["held_blocks"], both["failures"]) == (1, 2, {"internal": 1})


def test_nothing_is_nothing() -> None:
    assert is_nothing(no_counts())
    assert is_nothing(add_counts(no_counts(), no_counts()))
    assert summary(no_counts())["MB/s"] == 0
