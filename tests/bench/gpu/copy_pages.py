"""Whole C4 pages between device and host by kernel, scattered on both sides, beside one copy of as many bytes by a copy engine."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvbridge.core.plan.operations import PageArray, page_copies
from kvbridge.kernels.copies import StretchCopier
from kvbridge.kernels.cuda import runtime
from tests.bench.gpu import timing

LAYERS = 21
LAYER_PAGES = 1024
POOL_PAGES = LAYERS * LAYER_PAGES
CASES = ((1, (1, 8, 64, 512, 8192)), (LAYERS, (1, 8, 64, 512)))
WAYS = ("d2h", "h2d")
BLOCKS = 32


@dataclass(frozen=True)
class Beds:
    device: int
    host: int
    stream: int
    flush: timing.CacheFlush
    replays: int

    def sides(self, way: str) -> tuple[int, int]:
        return (self.device, self.host) if way == "d2h" else (self.host, self.device)


def run(*, quick: bool) -> dict[str, Any]:
    torch.cuda.set_device(0)
    size = POOL_PAGES * timing.PAGE_BYTES
    with (
        timing.host_memory(size) as mapping,
        timing.device_memory(size) as device,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        stream = torch.cuda.current_stream().cuda_stream
        beds = Beds(device, mapping.address, stream, timing.CacheFlush(0), 7 if quick else 21)
        cases = [
            _case(beds, way, layers=layers, pages=pages)
            for way in WAYS
            for layers, counts in CASES
            for pages in (counts[:3] if quick else counts)
        ]
    return {"cases": cases}


def _case(beds: Beds, way: str, *, layers: int, pages: int) -> dict[str, Any]:
    source, target = beds.sides(way)
    each = POOL_PAGES // layers
    ids = [torch.randperm(each, device="cuda", dtype=torch.int32)[:pages].contiguous() for _ in range(2)]
    total = layers * pages * timing.PAGE_BYTES
    timing.fill_random(source, POOL_PAGES * timing.PAGE_BYTES, 0, seed=pages)
    origins, targets = (_pages(address, layers, each) for address in (source, target))
    here, there = (chosen.cpu().numpy() for chosen in ids)
    operations = page_copies((origins, here), (targets, there), timing.PAGE_BYTES)
    with StretchCopier(0, blocks=BLOCKS) as copier:
        copier.submit(operations, stream=beds.stream)
        wrong = _wrong_pages(source, target, ids, layers=layers, each=each)
        assert not wrong, f"{wrong} wrong pages: {way}, {layers} layers, {pages} pages"
        how: dict[str, Any] = {"replays": beds.replays, "before": lambda _: beds.flush.enqueue(beds.stream)}
        us = timing.event_us(0, beds.stream, lambda: copier.submit(operations, stream=beds.stream), **how)
    copy = partial(runtime.copy, target, source, total, device=0, stream=beds.stream)
    link_us = timing.graph_us(0, beds.stream, copy, **how)
    return {
        "way": way,
        "layers": layers,
        "pages": pages,
        "bytes": total,
        "us": us,
        "gb_s": total / us / 1e3,
        "link_us": link_us,
        "link_gb_s": total / link_us / 1e3,
    }


def _pages(address: int, layers: int, each: int) -> PageArray:
    begins = (address + layer * each * timing.PAGE_BYTES for layer in range(layers))
    return PageArray.contiguous(*begins, page_count=each, stride_bytes=timing.PAGE_BYTES)


def _wrong_pages(source: int, target: int, ids: list[torch.Tensor], *, layers: int, each: int) -> int:
    words = POOL_PAGES * timing.PAGE_BYTES // 8
    torch.cuda.synchronize()
    sides = [timing.tensor_at(address, words, torch.int64, 0).reshape(layers, each, -1) for address in (source, target)]
    wrong = 0
    for layer in range(layers):
        read = [side[layer][chosen.long()] for side, chosen in zip(sides, ids, strict=True)]
        wrong += int((read[0] != read[1]).any(dim=1).sum())
    return wrong


def table(found: dict[str, Any]) -> str:
    return timing.with_budgets(found["cases"], timing.of_page_copies(found["cases"]))
