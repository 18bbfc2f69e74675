"""Results of vLLM's planner and cache managers for models: `python tests/vllm/planned.py`. In vLLM's environment.

Prints the places of all caches of DeepSeek-V4 in memory as JSON, after it has compared our order of blocks with the lists of vLLM's
managers, at every length of a prompt, on both sides.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kvbridge.engine.vllm.groups import NULL_BLOCK, read_groups

BLOCKS = 40
LATENT = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 576}
HALF = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}


def latent(ratio: int) -> MLAAttentionSpec:
    more = {
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    return MLAAttentionSpec(block_size=256, head_size=512, tokens_per_state=ratio, **LATENT, **more)


def indexer() -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=256, head_size=132, dtype=torch.uint8, tokens_per_state=4, **LATENT)


def window(*, bounded_replay: bool = False) -> SlidingWindowMLASpec:
    more = {
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    return SlidingWindowMLASpec(
        block_size=64, head_size=512, sliding_window=128, bounded_replay=bounded_replay, **LATENT, **more
    )


def states(block: int, reach: int, width: int) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(block_size=block, head_size=width, dtype=torch.float32, sliding_window=reach, **LATENT)


def deepseek_v4(plain: int, fours: int, hundreds: int) -> dict[str, KVCacheSpec]:
    """All caches of a model with so many layers without compression, and with compression by 4 and by 128."""
    specs: dict[str, KVCacheSpec] = {}
    ratios = [0] * plain + [
        ratio for pair in itertools.zip_longest([4] * fours, [128] * hundreds) for ratio in pair if ratio
    ]
    for layer, ratio in enumerate(ratios):
        name = f"model.layers.{layer}.attn"
        specs[f"{name}.swa_cache"] = window()
        if ratio:
            specs[f"{name}.mla_attn"] = latent(ratio)
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = indexer()
            specs[f"{name}.compressor.state_cache"] = states(4, 8, 2048)
            specs[f"{name}.indexer.compressor.state_cache"] = states(4, 8, 512)
        elif ratio == 128:
            specs[f"{name}.compressor.state_cache"] = states(8, 128, 1024)
    return specs


def with_ring() -> dict[str, KVCacheSpec]:
    """Pages of different sizes over each other, as DeepSeek-V4.1 has them: windows that are replayed, and rings."""
    specs: dict[str, KVCacheSpec] = {}
    for layer in range(6):
        name = f"model.layers.{layer}.attn"
        specs[f"{name}.swa_cache"] = window(bounded_replay=True)
        specs[f"{name}.mla_attn"] = latent(2 if layer % 2 else 1)
        if layer % 2:
            specs[f"{name}.state_cache"] = CircularBufferSpec(
                block_size=8, num_kv_heads=1, head_size=1024, head_size_v=0, dtype=torch.float32, dcp_sharded=False
            )
    return specs


PACKED = {"Flash": deepseek_v4(2, 21, 20), "Pro": deepseek_v4(0, 30, 31), "ring": with_ring()}


def planned(specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    layout = _layout()
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
            mamba_cache_mode="none",
        ),
        model_config=SimpleNamespace(max_model_len=4096),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    found = get_kv_cache_config_from_groups(config, get_kv_cache_groups(config, specs), 1 << 40)
    found.kv_cache_layout = layout.name
    return found


def _layout() -> Any:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return KVCacheLayout["BLHNC"]


def places(config: KVCacheConfig) -> dict[str, Any]:
    """Return where each cache lies in a row, and vLLM's groups as our connector reads them."""
    of = {name: number for number, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
    caches = []
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            spec = config.kv_cache_groups[of[name]].kv_cache_spec
            spec = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            offset = tensor.offset + index * tensor.layer_stride
            used = spec.num_states * spec.state_content_size_bytes
            caches.append({"name": name, "group": of[name], "offset": offset, "states": spec.num_states, "used": used})
    [row] = {tensor.block_stride for tensor in config.kv_cache_tensors}
    groups = [(one.kind, one.block_tokens, one.reach) for one in read_groups(config).groups]
    return {"row": row, "blocks": config.num_blocks, "groups": groups, "caches": caches}


def unpacked() -> Iterator[tuple[str, list[KVCacheSpec], int]]:
    """Groups of models, and the longest prompt to try."""
    full = FullAttentionSpec(block_size=16, **HALF)
    yield "full", [full], 100
    for reach in (1, 15, 16, 17, 48, 50):
        yield f"window {reach}", [SlidingWindowSpec(block_size=16, sliding_window=reach, **HALF), full], 2 * reach + 50
    yield "windows", [SlidingWindowSpec(block_size=32, sliding_window=40, **HALF), full], 160
    yield "chunks", [ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=48, **HALF), full], 160
    state = {"shapes": ((4, 4),), "dtypes": (torch.float32,)}
    yield "states", [MambaSpec(block_size=4096, **state), full], 100
    yield "aligned states", [MambaSpec(block_size=16, mamba_cache_mode="align", **state), full], 100
    ring = CircularBufferSpec(block_size=8, **HALF)
    yield "ring", [ring, SlidingWindowSpec(block_size=16, sliding_window=40, **HALF), full], 130


def compare(name: str, config: KVCacheConfig, longest: int, chunk: int) -> int:
    """Compare at every length. Returns how many lengths there were. Raises AssertionError."""
    groups = read_groups(config)
    sizes = [group.block_tokens for group in groups.groups]
    step, least = math.lcm(*sizes), math.gcd(*sizes)
    for tokens in range(1, longest + 1):
        order = groups.of(tokens)
        for chunks in (chunk, longest, 0):  # 0: loaded from elsewhere
            manager = KVCacheManager(config, 4096, step, least, enable_caching=False)
            request = Request("r", list(range(tokens)), SamplingParams(max_tokens=1), None)
            lists = _computed(manager, request, tokens, chunks) if chunks else _loaded(manager, request, tokens)
            picked, what = order.pick(lists), f"{name}, {tokens} tokens in chunks of {chunks}"
            assert len(picked) == len(order) == len(set(picked)), f"{what}: {picked} of {lists}"
            for group, blocks in zip(groups.groups, lists, strict=True):
                if group.holds_tokens:
                    needed = {block for block in blocks[: -(-tokens // group.block_tokens)] if block != NULL_BLOCK}
                    assert needed <= set(picked), f"{what}: {needed - set(picked)} of {lists} left out"
            if not chunks:  # decode goes on with these blocks
                request.num_computed_tokens = tokens
                request.append_output_token_ids(1)
                assert manager.allocate_slots(request, 1)
                now = manager.get_block_ids("r")
                after = order.pick(now)
                assert after == picked, f"{what}: {picked} became {after}"
    return longest


def _computed(manager: KVCacheManager, request: Request, tokens: int, chunk: int) -> tuple[list[int], ...]:
    """As prefill's scheduler has it when the request has finished."""
    for start in range(0, tokens, chunk):
        step = min(chunk, tokens - start)
        assert manager.allocate_slots(request, step)
        request.num_computed_tokens += step
    manager.remove_skipped_blocks("r", tokens, num_prompt_tokens=tokens)
    return manager.get_block_ids_for_computed_tokens("r", tokens)


def _loaded(manager: KVCacheManager, request: Request, tokens: int) -> tuple[list[int], ...]:
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
    return manager.get_block_ids("r")


def main() -> None:
    configs = {name: planned(specs) for name, specs in PACKED.items()}
    lengths = 0
    for name, specs, longest in unpacked():
        made = [KVCacheGroupSpec([f"model.layers.{number}.attn"], spec) for number, spec in enumerate(specs)]
        lengths += compare(name, KVCacheConfig(200, [], made), longest, 16)
    for name, config in configs.items():
        of_scheduler = generate_scheduler_kv_cache_config([config])
        lengths += compare(name, KVCacheConfig(1000, [], of_scheduler.kv_cache_groups), 600, 256)
    print(json.dumps({"lengths": lengths, "places": {name: places(config) for name, config in configs.items()}}))


if __name__ == "__main__":
    main()
