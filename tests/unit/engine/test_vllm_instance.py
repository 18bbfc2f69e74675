"""vLLM's configuration as it is read, and settings that are refused before anything starts; counts for vLLM's log and metrics."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.core.errors import ConfigError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Role
from kvbridge.core.plan.operations import Amount
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.vllm.requests import read_instance
from kvbridge.engine.vllm.stats import TransferStats, add_counts, is_nothing, no_counts, summary
from tests.helpers.hooked_vllm import FullAttentionSpec, cache_config, vllm_config


def event(kind: str, code: str = "", size: int = 0, seconds: float = 0.0) -> RoomEvent:
    amounts = {ComponentKind.MHA_KV: Amount(bytes=size, operations=3)} if size else {}
    return RoomEvent(room=1, generation=1, kind=kind, code=code, amounts=amounts, phases_s={"offer_to_commit": seconds})


def test_what_happened_is_told_once_and_what_is_held_as_it_is() -> None:
    stats = TransferStats()
    assert stats.take() is None
    assert is_nothing(add_counts(no_counts(), no_counts()))
    assert summary(no_counts())["MB/s"] == 0
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
    shown = {"Loads": 1, "Avg load time (ms)": 500, "MB": 1.049, "Operations": 3, "Sent": 1, "Held blocks": 2}
    assert shown.items() <= both.items()
    assert (both["Failed (unknown_room)"], both["Failed (refused)"]) == (2, 1)


def test_that_nothing_is_held_any_more_is_something_and_is_not_forgotten_for_counts_that_do_not_know() -> None:
    """A held count stays on display until another one is reported, so its end must be reported."""
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


# ---------------------------------------------------------------------------------------------- the configuration


def read(kv_role: str = "kv_producer", extra: dict[str, Any] | None = None, specs: Any = None, **more: Any) -> Any:
    found = cache_config(*([FullAttentionSpec(128)] if specs is None else specs))
    return read_instance(vllm_config(kv_role, extra, **more), found, version="0.32.0")


def test_an_instance_is_what_its_configuration_says() -> None:
    extra = {"allowed_prefill": ["tcp://10.0.0.1:7801"], "transports": {"order": ["nixl"]}}
    found = read("kv_both", extra, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (found.engine_id, found.roles, found.ranks, found.groups.block_tokens) == (
        "e",
        (Role.PREFILL, Role.DECODE),
        6,
        128,
    )
    assert found.allowed_prefill == {"tcp://10.0.0.1:7801"}
    assert found.extra == {"transports": {"order": ["nixl"]}}
    assert all(found.facts.values()), "a fact is never empty"
    assert (found.facts["dtype"], found.facts["revision"]) == ("float32", "none")
    assert [read(role).roles for role in ("kv_producer", "kv_consumer")] == [(Role.PREFILL,), (Role.DECODE,)]
    assert extra["allowed_prefill"], "each process of vLLM reads it"
    with pytest.raises(ConfigError, match="allowed_prefill: expected a list"):
        read(extra={"allowed_prefill": "tcp://10.0.0.1:7801"})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"specs": []}, "the model has none"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"speculative": SimpleNamespace(method="eagle")}, r"\(eagle\).*leave --speculative-config out"),
    ],
)
def test_what_cannot_be_transferred_is_refused_with_the_way_out(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"kvbridge cannot transfer this KV cache: .*{reason}"):
        read(**fields)
