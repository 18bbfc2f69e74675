"""An engine's own tensors on a GPU, as it brings them to a node: rows of larger ones, as engines have them.

Owns: the tensors of one rank, and a decode engine in a process of its own that brings such. Must not know: tests.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.engine.adopted import adopted_region
from kvbridge.engine.decode import DecodeEngine
from kvbridge.pool.memory.layout import RankPart
from tests.helpers.whole_rooms import CLAIM_S, check_rows

TINY = preset("tiny-v4")


def engine_memory(
    pages: dict[IndexSpace, int], device: int, exclude: frozenset[ComponentKind]
) -> tuple[dict[Rank, list[Any]], list[torch.Tensor]]:
    """The regions of one rank, and the tensors that have to be kept."""
    rank = Rank(pp=0, tp=0)
    part = RankPart.of(TINY, rank, pp_size=1, tp_size=1)
    regions, tensors = [], []
    for component, layers in part.components(TINY, exclude):
        for layer in layers:
            shape = pages[component.space], component.page_bytes() + 64
            tensors.append(torch.zeros(shape, dtype=torch.uint8, device=f"cuda:{device}"))
            regions.append(adopted_region(component, layer, tensors[-1][:, : component.page_bytes()]))
    return {rank: regions}, tensors


def decode_into_own(
    pipe: Connection, runtime_dir: str, pages: dict[IndexSpace, int], exclude: frozenset[ComponentKind], device: int
) -> None:
    """The target of a spawned process: a decode engine that brings its own tensors.

    For each pair of a room and its tables it provides the pages, says so, claims the room, compares every row, and releases it.
    """
    regions, tensors = engine_memory(pages, device, exclude)
    torch.cuda.synchronize(device)
    with DecodeEngine.adopt(runtime_dir, regions) as engine:
        pipe.send("there")
        while True:
            try:
                room, tables = pipe.recv()
            except EOFError:
                break
            while ("wanted", room) not in {(event.kind, event.room) for event in engine.events(CLAIM_S)}:
                pass
            engine.provide(room, tables)
            pipe.send("provided")
            check_rows(engine, engine.wait_claim(room, CLAIM_S))
            engine.release(room)
            pipe.send("released")
    del tensors
