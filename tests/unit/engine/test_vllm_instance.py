"""vLLM's configuration as it is read, and settings that are refused before anything starts; counts for vLLM's log and metrics."""

import json
from dataclasses import dataclass
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
from tests.helpers.hooked_vllm import FullAttentionSpec, SlidingWindowSpec, cache_config, vllm_config


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


class SinkFullAttentionSpec(FullAttentionSpec):
    """As vLLM's."""


class MLAAttentionSpec(FullAttentionSpec):
    """As vLLM's."""


@dataclass
class CrossAttentionSpec:
    block_size: int


@dataclass
class ChunkedLocalAttentionSpec:
    block_size: int
    attention_chunk_size: int


@dataclass
class CircularBufferSpec:
    block_size: int


@dataclass
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...] = ((3, 8), (4, 2, 2))
    dtypes: tuple[str, ...] = ("torch.bfloat16", "torch.float32")


@dataclass
class Uniform:
    kv_cache_specs: dict[str, Any]


FULL, NGRAM = FullAttentionSpec(128), SimpleNamespace(method="ngram")


def read(kv_role="kv_producer", extra=None, specs=None, host_resident=False, **more):
    found = cache_config(*([FULL] if specs is None else specs))
    for group in found.kv_cache_groups:
        group.host_resident = host_resident
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
        ({"speculative": NGRAM, "specs": [MambaSpec(64)]}, r"\(ngram\) moves states"),
        ({"specs": [FULL, CrossAttentionSpec(16)]}, "kind CrossAttentionSpec"),
        ({"specs": [SinkFullAttentionSpec(16)]}, "SinkFullAttentionSpec.*keeps tokens of the layer"),
        (
            {"specs": [Uniform({"a": FULL, "b": SlidingWindowSpec(16, 48)})]},
            "keep different blocks: full attention.*sliding",
        ),
        ({"specs": [FULL], "host_resident": True}, "HiSparse"),
    ],
)
def test_what_cannot_be_transferred_is_refused_with_the_way_out(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"kvbridge cannot transfer this KV cache: .*{reason}"):
        read(**fields)


def test_groups_are_read_with_what_both_sides_must_agree_on() -> None:
    specs = [
        SlidingWindowSpec(16, 48, extra_retained_tokens=2),
        Uniform({"a": MLAAttentionSpec(64), "b": FullAttentionSpec(64)}),
        ChunkedLocalAttentionSpec(32, 96),
        MambaSpec(1024),
        CircularBufferSpec(8),
    ]
    found = read(specs=specs)
    assert [(group.kind.name, group.block_tokens, group.reach) for group in found.groups.groups] == [
        ("WINDOW", 16, 50),
        ("FULL", 64, 0),
        ("CHUNK", 32, 96),
        ("STATE", 1024, 0),
        ("RING", 8, 0),
    ]
    assert (found.groups.block_tokens, found.groups.blocks, found.groups.has_states) == (64, 8, True)
    told = {name: fact for name, fact in found.facts.items() if name.startswith("kv_") and name != "kv_cache_dtype"}
    assert told["kv_group_0"].startswith("sliding window of 50, 16 tokens a block, 1 layers ")
    assert told["kv_group_3"].endswith(", 3x8:bfloat16 4x2x2:float32")
    assert told | {f"kv_group_{number}": "" for number in range(5)} == {
        **{f"kv_group_{number}": "" for number in range(5)},
        "kv_layout": "LBHNC",
        "kv_step_back": "1 token",
    }
    other = read(specs=[SlidingWindowSpec(16, 49, extra_retained_tokens=2), *specs[1:]]).facts
    assert {name for name in told if other[name] != told[name]} == {"kv_group_0"}
    assert not read().groups.facts, "one group of full attention is described by its tensors"


def test_drafts_that_are_looked_up_in_tokens_have_no_cache_and_are_allowed() -> None:
    assert read(speculative=NGRAM).groups.is_plain
    assert not read(speculative=NGRAM, specs=[FULL, SlidingWindowSpec(16, 48)]).groups.is_plain
