"""SGLang's own DeepSeek-V4 pools, made on a processor with Flash's numbers. Runs in SGLang's environment.

`forms` says which rows of a page a prompt has, in the words of SGLang's kernels and not of kvbridge: rows of a page stand one
behind the other, all parts of one kind before all parts of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache import deepseek_v4_memory_pool as memory_pool, memory_pool_host

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
PAGE_TOKENS, WINDOW, HOST_ROWS = 256, 128, 64
PAGES, WINDOW_PAGES, SLOTS = 40, 20, 9
Bytes = npt.NDArray[np.uint8]


class Off:
    """A section of SGLang's settings in which everything is off."""

    def __getattr__(self, name: str) -> Any:
        return False


def made(
    *, hisparse: bool = False, nextn: bool = False, ratios: list[int] = RATIOS, layers: range | None = None
) -> Any:
    """Return a pool of the production form, without the server that would have published its settings.

    `nextn`: with the rings of speculation, and with fp4 keys of the indexer. `layers`: those of a pipeline stage.
    """
    kernel = SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=nextn)
    memory_pool.get_exec = lambda: SimpleNamespace(kernel=kernel, features=Off(), moe=Off())
    spec = SimpleNamespace(speculative_algorithm="EAGLE" if nextn else None, speculative_num_draft_tokens=2 * nextn)
    memory_pool.get_spec = lambda: spec
    layers, ring = layers or range(len(ratios)), 2 if nextn else 1
    return memory_pool.DeepSeekV4TokenToKVPool(
        max_num_reqs=SLOTS - 1,
        swa_size=PAGE_TOKENS * WINDOW_PAGES,
        c4_size=PAGE_TOKENS // 4 * (4 if hisparse else PAGES),
        c128_size=PAGE_TOKENS // 128 * PAGES,
        c4_state_pool_size=8 * ring * WINDOW_PAGES,
        c128_state_pool_size=128 * ring * SLOTS,
        page_size=PAGE_TOKENS,
        swa_page_size=PAGE_TOKENS,
        dtype=torch.uint8,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=len(layers),
        device="cpu",
        enable_memory_saver=False,
        enable_hisparse=hisparse,
        compression_ratios=ratios,
        sliding_window=WINDOW,
        start_layer=layers.start,
        end_layer=layers.stop,
    )


def host_pool(pool: Any) -> Any:
    """Return the pool of HiSparse's coordinator for this pool, in memory that CUDA has not pinned."""
    device = pool.c4_kv_pool
    memory_pool_host.host_memory_budget_bytes = lambda: PAGES * 1_000_000  # SGLang keeps 10 GB of a host free
    return memory_pool_host.DeepSeekV4PagedHostPool(
        pool_name="dsv4_hisparse_c4",
        device_buffers=device.kv_buffer,
        item_bytes=device.bytes_per_page_padded,
        num_host_pages=PAGES,
        slot_page_size=device.page_size,
        layout="layer_first",
        pin_memory=False,
    )


def memory(pool: Any, host: Any = None, draft: Any = None) -> dict[tuple[str, int], Bytes]:
    """Return all buffers that take part in a transfer as [pages, bytes], by the pool's own attributes and global layer."""
    stage = range(pool._stage_start, pool._stage_end)
    c4, c128 = ([layer for layer in stage if RATIOS[layer] == ratio] for ratio in (4, 128))
    states = {layer: pool.compress_state_pools[layer].kv_score_buffer.kv_score for layer in (*c4, *c128)}
    index_states = {layer: pool.indexer_compress_state_pools[layer].kv_score_buffer.kv_score for layer in c4}
    windows = [*pool.swa_kv_pool.kv_buffer, *(draft.swa_kv_pool.kv_buffer if draft is not None else ())]
    found = {
        "c4_kv": zip(c4, pool.c4_kv_pool.kv_buffer if host is None else host.kv_buffer, strict=True),
        "c4_indexer": zip(c4, pool.c4_indexer_kv_pool.index_k_with_scale_buffer, strict=True),
        "c128_kv": zip(c128, pool.c128_kv_pool.kv_buffer, strict=True),
        "swa_kv": enumerate(windows, stage.start),
        "c4_state": ((layer, states[layer]) for layer in c4),
        "c4_indexer_state": index_states.items(),
        "c128_state": ((layer, states[layer]) for layer in c128),
    }
    form_of = forms(nextn=draft is not None)
    return {
        (kind, layer): _pages(tensor, form_of[kind].page_bytes)
        for kind, layers in found.items()
        for layer, tensor in layers
    }


def _pages(tensor: torch.Tensor, page_bytes: int) -> Bytes:
    flat = tensor.view(torch.uint8).reshape(-1).numpy()
    return flat[: len(flat) // page_bytes * page_bytes].reshape(-1, page_bytes)


@dataclass(frozen=True)
class Form:
    """The pages of one kind."""

    space: str
    page_bytes: int
    rows: int
    """Rows of a page."""
    parts_bytes: tuple[int, ...]
    slots: Callable[[int], Mapping[int, npt.NDArray[np.int64]]]
    """For a prompt of so many tokens: by page, counted from the prompt's start, the rows in it that are read later."""

    def masks(self, tokens: int) -> dict[int, npt.NDArray[np.bool_]]:
        """Return by page which bytes of it a prompt has."""
        return {page: self._mask(slots) for page, slots in self.slots(tokens).items() if len(slots)}

    def _mask(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        mask, begin = np.zeros(self.page_bytes, dtype=np.bool_), 0
        for width in self.parts_bytes:
            mask[begin : begin + self.rows * width].reshape(self.rows, width)[slots] = True
            begin += self.rows * width
        return mask


def _rows(rows: range, rows_per_page: int, ring: int = 0) -> dict[int, npt.NDArray[np.int64]]:
    pages = range(rows.start // rows_per_page, -(-rows.stop // rows_per_page))
    each = np.arange(rows.start, rows.stop)
    return {page: each[each // rows_per_page == page] % (ring or rows_per_page) for page in pages}


def _overlapping(tokens: int) -> range:
    """The block of four tokens that is being filled, and the one before it."""
    return range(max(0, tokens // 4 * 4 - 4), tokens)


def forms(*, nextn: bool) -> dict[str, Form]:
    """Return the pages of each kind."""
    ring, key = (16, (64, 4)) if nextn else (8, (128, 4))
    return {
        "c4_kv": Form("full", 37_440, 64, (576, 8), lambda tokens: _rows(range(tokens // 4), 64)),
        "c4_indexer": Form("full", 64 * sum(key), 64, key, lambda tokens: _rows(range(tokens // 4), 64)),
        "c128_kv": Form("full", 1_728, 2, (576, 8), lambda tokens: _rows(range(tokens // 128), 2)),
        "swa_kv": Form(
            "swa", 149_760, 256, (576, 8), lambda tokens: _rows(range(max(0, tokens - WINDOW), tokens), 256)
        ),
        "c4_state": Form("swa", ring * 8_192, ring, (8_192,), lambda tokens: _rows(_overlapping(tokens), 256, ring)),
        "c4_indexer_state": Form(
            "swa", ring * 2_048, ring, (2_048,), lambda tokens: _rows(_overlapping(tokens), 256, ring)
        ),
        "c128_state": Form("request", 524_288, 128, (4_096,), lambda tokens: {0: np.arange(tokens % 128)}),
    }
