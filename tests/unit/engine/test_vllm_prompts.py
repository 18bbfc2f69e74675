"""What a room is of, and what vLLM cannot be started with."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import UnsupportedError
from kvbridge.engine.adapters.vllm.limits import Settings, require_supported
from kvbridge.engine.adapters.vllm.prompts import DIGEST_BYTES, prompt_digest, room_tokens


def test_prompts_that_differ_in_anything_have_other_digests():
    prompts = [
        prompt_digest([1, 2, 3]),
        prompt_digest([1, 2]),
        prompt_digest([1, 2, 4]),
        prompt_digest([3, 2, 1]),
        prompt_digest([1, 2, 3], adapter="french"),
        prompt_digest([1, 2, 3], salt="french"),
        prompt_digest([1, 2, 3], inputs=["french"]),
        prompt_digest([1, 2, 3], inputs=["fr", "ench"]),
        prompt_digest([1, 2, 3], inputs=["", "french"]),
    ]
    assert len(set(prompts)) == len(prompts)
    assert {len(digest) for digest in prompts} == {DIGEST_BYTES}
    assert prompt_digest(np.array([1, 2, 3], dtype=np.int32)) == prompts[0]


def test_the_digest_of_a_prompt_is_the_same_in_every_release():
    assert prompt_digest(range(40), adapter="a", inputs=["i"], salt="s").hex() == "2c4a208579a787642da17fbd8eb961b6"


@pytest.mark.parametrize(("tokens", "expected"), [(1, 16), (16, 16), (17, 32), (37, 48)])
def test_rooms_are_of_whole_blocks(tokens, expected):
    assert room_tokens(tokens, 16) == expected


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
