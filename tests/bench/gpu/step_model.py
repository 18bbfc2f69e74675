"""One decode step of DeepSeek-V4-Flash on one of eight GPUs, as bytes, and how many requests a fixed memory holds. Pure.

Owns: what each layer reads, and the fit. Must not know: devices, time.

What a request's cache takes and what its layers read of it follows from the geometry. The weights follow from the model's published
sizes: 43 layers of 256 experts of 3 x 4,096 x 2,048 numbers (277 of 284 B), 6 of them and a shared one for each token, 13 B active.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.hot_buffer import SparseSettings, sparse_request_bytes
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace

GEOMETRY = preset("deepseek-v4-flash")
C4 = GEOMETRY.component(ComponentKind.C4_KV)
INDEXER = GEOMETRY.component(ComponentKind.C4_INDEXER)
C128 = GEOMETRY.component(ComponentKind.C128_KV)
WINDOW = GEOMETRY.component(ComponentKind.SWA_KV)
LAYERS = GEOMETRY.layer_count
WINDOW_TOKENS = 128
TOP_K, HOT_ROWS = 512, 4096
GPUS = 8
"""That share the experts; each has its own requests, and a copy of all other weights."""
HIDDEN = 4096
EXPERTS, EXPERTS_A_TOKEN = 256, 6
EXPERT_BYTES = 3 * HIDDEN * 2048 * 17 // 32
"""4 bits a number, and one byte of scale for 32 of them."""
PROJECTION_BYTES = 100_000_000
"""Of a layer, 8 bits a number: what is active beside experts and vocabulary."""
CACHE_BYTES = 80 * 10**9
"""Device memory for caches: what an H200 has left beside 18.4 GB of experts, 4.3 GB of other weights and what a step needs."""


@dataclass(frozen=True)
class LayerReads:
    """What one layer reads in a step, in bytes for each request."""

    number: int
    indexer: int
    """Keys of all rows; 0 where there is no indexer, and nothing is selected."""
    whole: int
    """Rows that attention reads without a choice: the window, and all rows of a C128 layer."""


def layer_reads(tokens: int) -> tuple[LayerReads, ...]:
    """Every layer, at a context of so many tokens."""
    window = WINDOW_TOKENS * WINDOW.row_bytes
    heavy = tokens // C128.tokens_per_row * C128.row_bytes
    keys = tokens // INDEXER.tokens_per_row * INDEXER.row_bytes
    return tuple(
        LayerReads(number, keys if number in C4.layers else 0, window + (heavy if number in C128.layers else 0))
        for number in range(LAYERS)
    )


def settings(tokens: int, requests: int) -> SparseSettings:
    """The hot buffer of the benchmark."""
    return SparseSettings(max_requests=requests, hot_rows=HOT_ROWS, top_k=TOP_K, max_tokens=tokens)


@dataclass(frozen=True)
class RequestBytes:
    """What the cache of one request of some length takes."""

    device: int
    host: int


def request_bytes(tokens: int, *, sparse: bool) -> RequestBytes:
    """With everything on the device, or with the sparse component on the host and a hot buffer for it."""
    pages = pages_needed(GEOMETRY, tokens=tokens)
    device = sum(
        pages[part.space] * part.page_bytes() * len(part.layers) for part in GEOMETRY.components if part is not C4
    )
    selected = pages[IndexSpace.FULL] * C4.page_bytes() * len(C4.layers)
    if not sparse:
        return RequestBytes(device + selected, 0)
    hot = sparse_request_bytes(settings(tokens, 1), C4, len(C4.layers)).total
    return RequestBytes(device + hot, selected)


def fit(tokens: int, *, sparse: bool) -> int:
    """How many requests of that length the memory for caches holds."""
    return CACHE_BYTES // request_bytes(tokens, sparse=sparse).device


def expert_tokens(batch: int) -> int:
    """How many tokens each expert gets in a step when all GPUs have such a batch, rounded up to what a multiplication likes."""
    return max(16, -(-GPUS * batch * EXPERTS_A_TOKEN // EXPERTS // 8) * 8)
