"""A decode engine with a hot buffer: python sparse_decode.py RUNTIME_DIR ROOM STEPS.

In place of a model it appends rows with the number of their layer and selects rows at random. It replaces decode_engine.py, which
lists all steps. RUNTIME_DIR is the decode node's (DIR/run/decode, after `kvbridge init DIR`); its C4 cache is in the host pool.
ROOM is the `room` of a ticket for at least STEPS new tokens (`max_new_tokens`). Run it at the same time as prefill_engine.py.
"""

import sys

import torch

from kvbridge.engine import ComponentKind, DecodeEngine, IndexSpace
from kvbridge.sparse import SparseCache, SparseSettings


def decode(runtime_dir: str, room_id: int, steps: int) -> None:
    with DecodeEngine.attach(runtime_dir) as bridge:
        views, c4 = bridge.views[bridge.ranks[0]], bridge.geometry.component(ComponentKind.C4_KV)
        hosts = [views.region(c4.kind, layer, space=IndexSpace.HOST).region for layer in views.layers(c4.kind)]
        settings = SparseSettings(max_requests=2, hot_rows=128, top_k=64, max_tokens=8192)
        with SparseCache(settings, c4, hosts, torch.device("cpu")) as cache:  # once, for all requests
            room = bridge.claim(room_id, timeout_s=60)
            slot, tokens = 0, room.prompt_tokens
            shared = room.held_by_decode // bridge.geometry.tokens_per_page  # pages that others read as well
            cache.admit(slot, room.tables[IndexSpace.HOST].ids, tokens // c4.tokens_per_row, shared_pages=shared)
            for now in range(tokens + 1, tokens + 1 + steps):
                rows = now // c4.tokens_per_row  # a new one every fourth token
                cache.begin_step([(slot, rows)])  # every request of the batch
                for layer in cache.layers:
                    cache.append(layer, torch.full((1, c4.row_bytes), layer, dtype=torch.uint8))  # of the compressor
                    selected = torch.randint(rows, (1, settings.top_k), dtype=torch.int32)  # of the indexer
                    places = cache.swap_in(layer, selected)  # where attention reads, in cache.hot_pages(layer)
                    read = cache.rows(layer, places)  # or a copy of them
                cache.end_step()  # pages that are complete start on their way to the host
            print(tuple(read.shape), set(read.unique().tolist()), cache.counts(slot))
            released = cache.release(slot)
            released.wait(timeout_s=10)  # then nothing touches its host pages any more
            room.release(sparse=released.rows())  # with figures for the node's metrics


if __name__ == "__main__":
    decode(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
