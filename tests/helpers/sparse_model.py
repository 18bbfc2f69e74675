"""A model alone, and the same model with its C4 rows in host pages: sparse decode and what it is compared with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.geometry.costs import SparseSettings
from kvbridge.core.geometry.models import geometry_from_config
from kvbridge.core.ids import IndexSpace, PageTable, Tables
from kvbridge.engine import DecodeRoom, PrefillRoom
from kvbridge.engine.adapters import transformers
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, read_parts, reencoded
from kvbridge.sparse import SparseCache
from tests.helpers.sparse_reference import SelectedAttention, reencoding_cache
from tests.helpers.sparse_simulation import check_tables
from tests.helpers.torch_pools import Form, Pools, engine_of, load_config, make_pools, part, prompt_tokens

C4 = ComponentKind.C4_KV
HOST = frozenset({C4})


@dataclass
class Alone:
    generated: transformers.Generated
    cache: DynamicCache

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.generated.tokens

    @property
    def logits(self) -> torch.Tensor:
        return self.generated.logits

    def entries(self, layer: int) -> torch.Tensor:
        entries: torch.Tensor = self.cache.layers[layer].compressed_kv["compressor"][0]
        return entries


class SparseModelPair:
    def __init__(self, encoding: Encoding = Encoding.NATIVE, device: str = "cpu", config: dict[str, Any] | None = None):
        facts = config or load_config()
        self.device = torch.device(device)
        self.model = transformers.load_model(facts, device=self.device)
        self.geometry = geometry_from_config(facts, encoding=encoding)
        self.codec = CacheCodec(self.geometry, self.model)
        self.c4 = self.geometry.component(C4)
        self.top_k = int(self.model.config.index_topk)

    def prefill(self, tokens: int, *, offset: int = 0) -> transformers.Prefill:
        return transformers.prefill_chunks(self.model, prompt_tokens(tokens, offset=offset), chunk_tokens=512)

    def alone(self, prefill: transformers.Prefill, steps: int) -> Alone:
        """Decode as sparse decode must to the last bit, with the loss of quantised rows."""
        cache = reencoded(self.codec, prefill.cache, into=reencoding_cache(self.model.config, self.codec))
        attention = SelectedAttention(self.model)
        with attention:
            generated = transformers.generate(self.model, cache, first_token=prefill.first_token, steps=steps)
        assert attention.steps == steps * len(self.c4.layers)
        return Alone(generated, cache)

    def pools(self, prefill: transformers.Prefill, *, steps: int, seed: int = 0) -> Pools:
        """Pages that hold a request, as a transfer leaves them, with room for `steps` more tokens."""
        tokens = prefill.cache.get_seq_length()
        form = Form(host=HOST, page_first=True, extent_pages=3)
        pools = make_pools(self.geometry, tokens=tokens + steps, prompt_tokens=tokens, seed=seed, form=form)
        self.codec.write(prefill.cache, PrefillRoom(engine_of(pools), 1, 1, tokens, pools.tables).final_parts(tokens))
        return pools

    def store(self, host: Pools, *, hot_rows: int, max_tokens: int, max_requests: int = 2, **more: int) -> SparseCache:
        settings = SparseSettings(
            max_requests=max_requests, hot_rows=hot_rows, top_k=self.top_k, max_tokens=max_tokens, **more
        )
        regions = [host.views.region(C4, layer, space=IndexSpace.HOST).region for layer in self.c4.layers]
        return SparseCache(settings, self.c4, regions, self.device)

    def host_entries(self, host: Pools, layer: int, tables: Tables, *, start: int, stop: int) -> torch.Tensor:
        """Return rows of a request in host pages as numbers: [rows, width]."""
        rows = part(host.views, tables, C4, layer, start, stop).read()
        return self.codec.row_codec(C4).decode(rows).to(self.device)


@dataclass
class SparseRequest:
    decoder: transformers.SparseDecoder
    slot: int
    cache: DynamicCache

    def step(self, token: int) -> torch.Tensor:
        return self.decoder.step(self.slot, self.cache, token=token)

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed tokens one by one: logits [steps, vocabulary]."""
        return torch.stack([self.step(token) for token in tokens])


def admitted(
    decoder: transformers.SparseDecoder, pools: Pools, slot: int, *, tokens: int, host: PageTable | None = None
) -> SparseRequest:
    tables = pools.tables if host is None else {**pools.tables, IndexSpace.HOST: host}
    read = read_parts(DecodeRoom(engine_of(pools), 1, 1, tokens, tables).parts())
    return SparseRequest(decoder, slot, decoder.admit(slot, tables, read, tokens=tokens))


@contextmanager
def decoding(
    scene: SparseModelPair, pools: Pools, *, hot_rows: int = 64, max_tokens: int = 2300, **more: int
) -> Iterator[transformers.SparseDecoder]:
    with (
        scene.store(pools, hot_rows=hot_rows, max_tokens=max_tokens, **more) as store,
        transformers.SparseDecoder(scene.model, scene.codec, store) as decoder,
    ):
        yield decoder


def check_past_many_evictions(scene: SparseModelPair, steps: int, hot_rows: int) -> None:
    """Logits are those of the model alone, and pages that became complete are on the host, byte for byte."""
    tokens = 2049
    prefill = scene.prefill(tokens, offset=97)
    alone = scene.alone(prefill, steps)
    pools = scene.pools(prefill, steps=steps)
    with decoding(scene, pools, hot_rows=hot_rows) as decoder:
        logits = admitted(decoder, pools, 1, tokens=tokens).feed(alone.tokens)
        check_tables(decoder.store)
        counts = decoder.store.counts(1)
    assert torch.equal(logits, alone.logits)
    assert counts.evicted > 10 * hot_rows
    assert counts.hits > 0
    complete = (tokens + steps) // 4 // 64 * 64
    assert complete >= tokens // 4
    for layer in scene.c4.layers:
        entries = scene.host_entries(pools, layer, pools.tables, start=0, stop=complete)
        assert torch.equal(entries, alone.entries(layer)[:complete])


def check_newest_rows(scene: SparseModelPair, tokens: int) -> None:
    """The newest rows are right from the first step, with as few hot rows as there can be, and nothing loaded before."""
    prefill = scene.prefill(tokens, offset=tokens)
    alone = scene.alone(prefill, 9)
    pools = scene.pools(prefill, steps=9)
    with decoding(scene, pools, preload_rows=0) as decoder:
        logits = admitted(decoder, pools, 0, tokens=tokens).feed(alone.tokens)
        check_tables(decoder.store)
    assert torch.equal(logits, alone.logits)
