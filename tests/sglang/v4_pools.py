"""SGLang's own DeepSeek-V4 pool, made on a processor, as kvbridge reads it: printed as JSON. Runs in SGLang's environment."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import setup_state_kv_args
from sglang.srt.mem_cache import deepseek_v4_memory_pool as memory_pool

from kvbridge.core.ids import Rank
from kvbridge.engine.sglang.pools import instance_geometry, rank_regions, read_pools

RATIOS = [0, 4, 128, 4, 128, 4]
CONFIG = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": len(RATIOS),
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_key_value_heads": 1,
    "sliding_window": 128,
    "compress_ratios": RATIOS,
}
PAGE_TOKENS, PAGES, WINDOW_PAGES, SLOTS = 256, 16, 8, 5
R0 = Rank(pp=0, tp=0)


class Off:
    """A section of SGLang's settings in which everything is off."""

    def __getattr__(self, name: str) -> Any:
        return False


def made() -> Any:
    """Return a pool of the production form, without the server that would have published its settings."""
    kernel = SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=False)
    memory_pool.get_exec = lambda: SimpleNamespace(kernel=kernel, features=Off(), moe=Off())
    memory_pool.get_spec = lambda: SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=0)
    return memory_pool.DeepSeekV4TokenToKVPool(
        max_num_reqs=SLOTS - 1,
        swa_size=PAGE_TOKENS * WINDOW_PAGES,
        c4_size=PAGE_TOKENS // 4 * PAGES,
        c128_size=PAGE_TOKENS // 128 * PAGES,
        c4_state_pool_size=8 * WINDOW_PAGES,
        c128_state_pool_size=128 * SLOTS,
        page_size=PAGE_TOKENS,
        swa_page_size=PAGE_TOKENS,
        dtype=torch.uint8,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(RATIOS),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=RATIOS,
        sliding_window=128,
    )


def main() -> None:
    """Print each component with its space, page bytes and layers, and the number of regions."""
    pool, args = made(), KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
    args.page_size, args.gpu_id, args.num_draft_entries = PAGE_TOKENS, 0, 0
    setup_state_kv_args(args, pool, None, len(RATIOS))
    pools = read_pools(args, pool, window=128, config=CONFIG)
    geometry = instance_geometry({R0: pools}, name="v4", tp_size=1, facts={}).geometry
    found = {part.kind: [part.space, part.page_bytes(), list(part.layers)] for part in geometry.components}
    print(json.dumps({"components": found, "regions": len(rank_regions(geometry, pools, R0))}))


if __name__ == "__main__":
    main()
