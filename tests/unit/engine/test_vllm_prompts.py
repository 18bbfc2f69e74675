"""What a room is of, and what vLLM cannot be started with."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import UnsupportedError
from kvbridge.engine.adapters.vllm.limits import Settings, require_supported


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"kv_cache_groups": 2}, "--disable-hybrid-kv-cache-manager"),
        ({"decode_context_parallel": 2}, "--decode-context-parallel-size"),
        ({"prefill_context_parallel": 2}, "--prefill-context-parallel-size"),
        ({"speculative_method": "eagle"}, r"\(eagle\).*leave --speculative-config out"),
        ({"block_sizes": (16, 32)}, r"16, 32 tokens\): set one --block-size"),
        ({"is_open": True}, "give it keys"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_way_out(settings, way_out):
    with pytest.raises(UnsupportedError, match=way_out):
        require_supported(Settings(**settings))


def test_everything_else_is_supported():
    require_supported(Settings())
    require_supported(Settings(block_sizes=(16, 16), is_open=True, has_keys=True))
    require_supported(Settings(is_open=True, insecure=True))
