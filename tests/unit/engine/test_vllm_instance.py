"""What is read of vLLM's configuration, and what of it is refused before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvbridge.core.errors import ConfigError, UnsupportedError
from kvbridge.core.ids import Role
from kvbridge.engine.vllm.requests import read_instance
from tests.helpers.hooked_vllm import vllm_config


def read(kv_role: str = "kv_producer", extra: dict[str, Any] | None = None, groups: int = 1, **more: Any) -> Any:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=128))
    config = vllm_config(kv_role, extra, **more)
    return read_instance(config, SimpleNamespace(kv_cache_groups=[group] * groups), version="0.32.0")


def test_an_instance_is_what_its_configuration_says() -> None:
    extra = {"allowed_prefill": ["tcp://10.0.0.1:7801"], "transports": {"order": ["nixl"]}}
    found = read("kv_both", extra, tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (found.engine_id, found.roles, found.ranks, found.block_tokens) == ("e", (Role.PREFILL, Role.DECODE), 6, 128)
    assert found.allowed_prefill == {"tcp://10.0.0.1:7801"}
    assert found.extra == {"transports": {"order": ["nixl"]}}
    assert all(found.facts.values()), "a fact is never empty"
    assert (found.facts["dtype"], found.facts["revision"]) == ("float32", "none")
    assert [read(role).roles for role in ("kv_producer", "kv_consumer")] == [(Role.PREFILL,), (Role.DECODE,)]


def test_what_is_for_the_connector_is_not_the_nodes_and_stays_in_vllms_configuration() -> None:
    extra = {"allowed_prefill": ["tcp://10.0.0.1:7801"]}
    assert read(extra=extra).extra == {}
    assert extra == {"allowed_prefill": ["tcp://10.0.0.1:7801"]}, "each process of vLLM reads it"
    with pytest.raises(ConfigError, match="allowed_prefill: expected a list"):
        read(extra={"allowed_prefill": "tcp://10.0.0.1:7801"})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": 2}, "--disable-hybrid-kv-cache-manager"),
        ({"groups": 0}, "the model has none"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"speculative": SimpleNamespace(method="eagle")}, r"\(eagle\).*leave --speculative-config out"),
    ],
)
def test_what_cannot_be_transferred_is_refused_with_the_way_out(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"kvbridge cannot transfer this KV cache: .*{reason}"):
        read(**fields)
