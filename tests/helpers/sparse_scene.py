"""A model, its dense decode, and the same decode with C4 rows in host pages: what sparse decode is compared with.

`HeldRows` is the plain form of a hot buffer: all rows in one list. A model that decodes with it does the very arithmetic of
sparse decode, so the two must be equal to the last bit; with the dense model they agree within the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbridge.cli.demo.ties import SelectedRows, tied_step
from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.geometry.huggingface import geometry_from_config
from kvbridge.core.ids import IndexSpace, PageTable, Tables
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, pack, reencoded
from kvbridge.engine.adapters.selection_watch import Selections, SelectionWatch
from kvbridge.engine.adapters.sparse_deepseek_v4 import (
    IndexerHooks,
    SparseDecoder,
    SparseRequest,
    reencoding_cache,
    sparse_cache,
)
from kvbridge.engine.adapters.transformers import (
    Generated,
    Prefill,
    follow,
    generate,
    load_config,
    load_model,
    prefill_chunks,
    prompt_tokens,
)
from kvbridge.engine.encodings import RowCodec
from kvbridge.engine.views import PoolViews
from kvbridge.sparse import SparseCache
from tests.helpers.torch_pools import Form, Pools, make_pools

C4 = ComponentKind.C4_KV
HOST = frozenset({C4})


class HeldRows:
    """One layer's rows of one request: encoded uint8 [rows, row_bytes], all of them."""

    def __init__(self, codec: RowCodec, entries: torch.Tensor) -> None:
        self._codec = codec
        self.rows = codec.encode(entries)

    def append(self, entries: torch.Tensor) -> None:
        self.rows = torch.cat([self.rows, self._codec.encode(entries)])

    def fetch(self, top_k: torch.Tensor) -> torch.Tensor:
        return self._codec.decode(self.rows[top_k])


@dataclass
class HeldRequest:
    """A request whose rows are held, after its decode."""

    generated: Generated
    rows: dict[int, HeldRows]
    selections: Selections


class SparseScene:
    """The tiny model on one device, in one encoding."""

    def __init__(
        self, encoding: Encoding = Encoding.NATIVE, device: str = "cpu", config: dict[str, Any] | None = None
    ) -> None:
        facts = config or load_config()
        self.device = torch.device(device)
        self.encoding = encoding
        self.model = load_model(facts, device=self.device)
        self.geometry = geometry_from_config(facts, encoding=encoding)
        self.codec = CacheCodec(self.geometry, self.model.config, device=self.device)
        self.c4 = self.geometry.component(C4)
        self.top_k = int(self.model.config.index_topk)

    def prefill(self, tokens: int, *, offset: int = 0) -> Prefill:
        return prefill_chunks(self.model, prompt_tokens(tokens, offset=offset), chunk_tokens=512)

    def dense(self, prefill: Prefill, steps: int) -> Generated:
        """The model alone; rows that are quantised lose what they lose on the way."""
        exact = self.encoding is Encoding.NATIVE
        into = None if exact else reencoding_cache(self.model.config, self.codec)
        cache = reencoded(self.codec, prefill.cache, into=into)
        return generate(self.model, cache, first_token=prefill.first_token, steps=steps)

    def dense_and_selections(self, prefill: Prefill, steps: int) -> tuple[Generated, Selections]:
        """As `dense`, and what its indexers selected."""
        watch = SelectionWatch(self.model)
        try:
            return self.dense(prefill, steps), watch.take()
        finally:
            watch.remove()

    def held(self, prefill: Prefill, tokens: Sequence[int]) -> HeldRequest:
        """The arithmetic of sparse decode over plain lists of rows, fed `tokens`."""
        codec = self.codec.row_codec(C4)
        rows = {
            layer: HeldRows(codec, prefill.cache.layers[layer].compressed_kv["compressor"][0])
            for layer in self.c4.layers
        }
        cache = self.codec.decode(
            prefill.cache.get_seq_length(),
            lambda *place: self.codec.encode(prefill.cache, place[0], place[1], start=place[2], stop=place[3]),
            into=sparse_cache(self.model.config, dict(rows)),
            elsewhere=HOST,
        )
        hooks, watch = IndexerHooks(self.model), SelectionWatch(self.model)
        try:
            return HeldRequest(follow(self.model, cache, tokens=tokens), rows, watch.take())
        finally:
            watch.remove()
            hooks.remove()

    def pools(self, prefill: Prefill, *, steps: int, seed: int = 0) -> Pools:
        """Pages that hold a request, as a transfer leaves them, with room for `steps` more tokens."""
        tokens = prefill.cache.get_seq_length()
        form = Form(host=HOST, page_first=True, extent_pages=3)
        pools = make_pools(self.geometry, tokens=tokens + steps, prompt_tokens=tokens, seed=seed, form=form)
        pack(self.codec, prefill.cache, placement=Placement(pools.views, pools.tables))
        return pools

    def store(self, host: Pools, *, hot_rows: int, max_tokens: int, max_requests: int = 2, **more: int) -> SparseCache:
        """A hot buffer over the host pool of `host`."""
        settings = SparseSettings(
            max_requests=max_requests, hot_rows=hot_rows, top_k=self.top_k, max_tokens=max_tokens, **more
        )
        regions = [host_region(host.views, layer) for layer in self.c4.layers]
        return SparseCache(settings, self.c4, regions, self.device)

    def host_rows(self, host: Pools, layer: int, tables: Tables, *, start: int, stop: int) -> torch.Tensor:
        """What host pages hold of a request: uint8 [rows, row_bytes]."""
        return host.views.read_rows(C4, layer, tables=tables, start_row=start, stop_row=stop)


def comparable_steps(one: Selections, other: Selections) -> int:
    """Steps before rounding makes two runs select different rows; see `ties`. All of them, but for bad luck."""
    tie = tied_step(SelectedRows(*one), SelectedRows(*other))
    return len(one.rows) if tie is None else tie


def host_region(views: PoolViews, layer: int) -> Any:
    return views.region(C4, layer, space=IndexSpace.HOST).region


def admitted(decoder: SparseDecoder, pools: Pools, slot: int, *, tokens: int, host: PageTable | None = None):
    """Admit the request in `pools`, with its own host table or another one."""
    tables = pools.tables if host is None else {**pools.tables, IndexSpace.HOST: host}
    return decoder.admit(slot, [Placement(pools.views, tables)], tokens=tokens)


def fed(decoder: SparseDecoder, request: SparseRequest, tokens: Sequence[int]) -> torch.Tensor:
    """Feed tokens one by one: logits [steps, vocabulary]."""
    return torch.stack([decoder.step(request, token=token) for token in tokens])
