"""Backup of single C4 rows: device to host, 21 layers in one launch, beside one copy of as many bytes by a copy engine.

Conditions are those of `sglang_h200.json` (host footprint 0.8 GiB).
"""

from __future__ import annotations

import torch

from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.places import IdPairs, PageMemory, RowPair
from kvbridge.kernels.row_copies import CudaRowCopier
from tests.bench.gpu.memory import (
    PAGE_BYTES,
    ROW_BYTES,
    SLOTS,
    CacheFlush,
    device_memory,
    fill_random,
    host_memory,
    row_words,
    tensor_at,
)
from tests.bench.gpu.timing import Record, graph_us

LAYERS = 21
LAYER_PAGES = 1024
COUNTS = (1, 64, 512, 4096)
ORDERS = ("random", "contiguous")


def run(record: Record, *, quick: bool) -> None:
    """Measure everything."""
    torch.cuda.set_device(0)
    size = LAYERS * LAYER_PAGES * PAGE_BYTES
    with host_memory(size) as mapping, device_memory(size) as device, torch.cuda.stream(torch.cuda.Stream()):
        fill_random(device, size, 0)
        flush = CacheFlush(0)
        pairs = [
            RowPair(_memory(device, layer), _memory(mapping.address, layer), (576, 8), SLOTS, SLOTS)
            for layer in range(LAYERS)
        ]
        with CudaRowCopier(0, pairs) as copier:
            for count in COUNTS[:2] if quick else COUNTS:
                for order in ORDERS:
                    case(record, copier, flush, device=device, host=mapping.address, count=count, order=order)


def case(
    record: Record, copier: CudaRowCopier, flush: CacheFlush, *, device: int, host: int, count: int, order: str
) -> None:
    """Check and time one copy."""
    stream = torch.cuda.current_stream().cuda_stream
    ids = [_ids(count, order) for _ in range(2)]
    rows = IdPairs(ids[0].data_ptr(), ids[1].data_ptr(), count)
    copier.copy(rows, stream=stream)
    wrong = _wrong_rows(device, host, ids)
    us = graph_us(0, stream, lambda: copier.copy(rows, stream=stream), before=lambda _: flush.enqueue(stream))
    total = LAYERS * count * ROW_BYTES
    link_us = graph_us(
        0,
        stream,
        lambda: runtime.copy(host, device, total, device=0, stream=stream),
        before=lambda _: flush.enqueue(stream),
    )
    record(
        rows=count,
        layers=LAYERS,
        order=order,
        bytes=total,
        us=us,
        gb_s=total / us / 1e3,
        link_us=link_us,
        link_gb_s=total / link_us / 1e3,
        wrong=f"{wrong} wrong rows" if wrong else "",
    )


def _ids(count: int, order: str) -> torch.Tensor:
    everything = LAYER_PAGES * SLOTS
    if order == "random":
        return torch.randperm(everything, device="cuda", dtype=torch.int32)[:count].contiguous()
    first = int(torch.randint(everything - count, ()))
    return torch.arange(first, first + count, device="cuda", dtype=torch.int32)


def _memory(address: int, layer: int) -> PageMemory:
    first = address + layer * LAYER_PAGES * PAGE_BYTES
    return PageMemory.contiguous(first, page_count=LAYER_PAGES, page_stride_bytes=PAGE_BYTES)


def _wrong_rows(device: int, host: int, ids: list[torch.Tensor]) -> int:
    torch.cuda.synchronize()
    words = LAYER_PAGES * PAGE_BYTES // 8
    wrong = 0
    for layer in range(LAYERS):
        here = 8 * layer * words
        source = tensor_at(device + here, words, torch.int64, 0)
        target = tensor_at(host + here, words, torch.int64, 0)
        wrong += int((row_words(source, ids[0].long()) != row_words(target, ids[1].long())).any(dim=1).sum())
    return wrong
