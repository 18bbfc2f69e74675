"""Hugging Face's own DeepSeek-V4, small and with random weights, as an engine on a CPU or a GPU; and its sparse decode.

Two processes compute the same bits with the same config, seed, dtype, device, thread count and library versions, and the same
chunks of the prompt (a matrix product of another shape rounds differently).

Sparse decode leaves the model's own code unchanged. In a forward pass a C4 layer hands its new entry to the cache and gets all
entries, lets the indexer select some, and gives the attention all entries with a bias that shuts out the others. Here the cache
(`SparseLayer`) returns room for the selected entries; a hook on the indexer, which runs after it, fetches them into this room and
renumbers the selection to places in it. The result differs from the dense model's by the rounding of sums over other numbers of
terms. Sorting the entries by row does not bring it closer (both were measured: 2e-6 in fp32).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.ids import IndexSpace, Tables
from kvbridge.core.process import Closing
from kvbridge.engine.adapters.deepseek_v4 import C4, SPARSE, CacheCodec, ReadRows
from kvbridge.engine.encodings import RowCodec
from kvbridge.sparse import SparseCache

INITIALIZER_RANGE = 0.08
"""Standard deviation of random weights: a random model with the library's 0.02 repeats one token."""
CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(DeepseekV4ForCausalLM.forward).parameters else "past_key_values"
)
"""Name of the cache among the arguments of a model and of its layers, which transformers 5.24 has changed."""
_ENTRIES = "compressor"
"""The cache's own name for the entries of the attention; the indexer's keys stay in the cache."""

Model = Any
"""A DeepseekV4ForCausalLM: transformers is untyped."""


class Prefill(NamedTuple):
    """A computed prompt: its cache, the fp32 logits [vocabulary] of its last position, and the most likely token."""

    cache: DynamicCache
    logits: torch.Tensor
    first_token: int


class Generated(NamedTuple):
    """The tokens that greedy decoding fed, and the fp32 logits [steps, vocabulary] after each of them."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


def load_model(
    config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Model:
    """Return a model with random weights that depend on `config`, `seed` and `dtype` only, made on the CPU.

    The model is on `device` (default: the CPU), without gradients, with eager attention and experts. From then on the whole process
    computes on one thread, because the logits depend on the thread count.
    """
    torch.set_num_threads(1)
    facts = {"initializer_range": INITIALIZER_RANGE, **config}
    facts.pop("model_type", None)
    model_config = DeepseekV4Config(**facts)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM.from_config
        model = build(model_config, attn_implementation="eager", experts_implementation="eager", dtype=dtype)
        # The library initialises these with zeros; with numbers in them, a mistake in moving them shows.
        for name, parameter in model.named_parameters():
            if name.endswith((".position_bias", ".sinks")):
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(".tid2eid"):  # distinct experts for each token, spread over all of them
                vocabulary, chosen = buffer.shape
                spread = torch.arange(vocabulary)[:, None] * 5 + torch.arange(chosen)
                buffer.copy_(spread % model_config.n_routed_experts)
    return model.to(device or "cpu").eval().requires_grad_(requires_grad=False)


def prefill_chunks(
    model: Model,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int,
    on_chunk: Callable[[DynamicCache, int], None] = lambda _cache, _tokens: None,
    cache: DynamicCache | None = None,
) -> Prefill:
    """Compute a prompt in chunks that end at multiples of `chunk_tokens`. Call `on_chunk` with the tokens computed so far.

    `cache` may hold a prefix. Computation continues from its end, with the bits of a computation from the start if the prefix ends
    at a multiple of `chunk_tokens`. Raises InvalidInputError without a token to compute: no cache holds the logits of the last
    token.
    """
    held = DynamicCache(config=model.config) if cache is None else cache
    start, stop = held.get_seq_length(), len(token_ids)
    if not start < stop or chunk_tokens < 1:
        raise InvalidInputError(
            f"need a prompt longer than the {start} tokens that are computed and chunk_tokens >= 1, got {stop} tokens and "
            f"{chunk_tokens}"
        )
    logits = torch.empty(0)
    while start < stop:
        end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        logits = forward(model, held, token_ids[start:end])
        on_chunk(held, end)
        start = end
    return Prefill(held, logits, int(logits.argmax()))


def generate(model: Model, cache: DynamicCache, *, first_token: int, steps: int) -> Generated:
    """Decode greedily: feed `first_token`, and then `steps - 1` times the most likely token."""
    tokens, logits = [first_token], [forward(model, cache, [first_token])]
    while len(tokens) < steps:
        tokens.append(int(logits[-1].argmax()))
        logits.append(forward(model, cache, [tokens[-1]]))
    return Generated(tuple(tokens), torch.stack(logits))


@torch.no_grad()
def forward(model: Model, cache: DynamicCache, tokens: Sequence[int]) -> torch.Tensor:
    """Feed tokens into the cache; return the fp32 logits [vocabulary] of the next token."""
    ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
    output = model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


class SparseLayer(DeepseekV4CSACache):  # type: ignore[no-untyped-call]  # transformers is half typed
    """The cache of a C4 layer whose attention sees only the selected entries: those of `store`, or without one those here."""

    _layer_type: str | None = None  # type: ignore[assignment]  # with a type it would replace the library's own class

    def __init__(self, config: Any, codec: RowCodec, layer: int, store: SparseCache | None) -> None:  # noqa: ANN401
        super().__init__(config)
        self._codec, self._layer, self._store = codec, layer, store
        self._top_k = int(config.index_topk)
        self._room: torch.Tensor | None = None
        self.entries_elsewhere = frozenset() if store is None else frozenset({C4})

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Take the new entry or none: [1, 0 or 1, width]. Return room for the selected entries."""
        if name != _ENTRIES:
            everything: torch.Tensor = super().update_compressor_states(name, compressed)
            return everything
        batch, count, width = compressed.shape
        if batch != 1 or count > 1:
            raise InvalidInputError(
                f"sparse decode takes one token of one request at a time, got {count} new entries in a batch of {batch}"
            )
        rows = self._codec.encode(compressed[0]) if count else None
        if rows is not None and self._store is None:  # with all that quantised rows lose
            super().update_compressor_states(name, self._codec.decode(rows)[None])
        elif rows is not None and self._store is not None:
            self._store.append(self._layer, rows)
            self.entry_count[name] += count
        self._room = compressed.new_zeros((1, min(self._top_k, self.entry_count[name]), width))
        return self._room

    def select(self, top_k: torch.Tensor) -> torch.Tensor:
        """Fetch the rows that the indexer selected, [1, 1, k], into the room. Return their places there; -1: no row."""
        room, self._room = self._room, None
        if room is None or top_k.shape != (1, 1, room.shape[1]):
            raise ConflictError(
                f"the indexer selected rows of shape {tuple(top_k.shape)} before room was made for as many; this release of "
                "transformers computes in another order than sparse decode knows"
            )
        count, store = room.shape[1], self._store
        if store is None:
            whole: Any = self.compressed_kv[_ENTRIES]
            room[0] = whole[0, top_k[0, 0]] if count else room[0]
        elif count:
            selected = torch.full((1, store.settings.top_k), -1, dtype=torch.int32, device=store.device)
            selected[0, :count] = top_k[0, 0]
            places = store.swap_in(self._layer, selected)[0, :count]
            room[0] = self._codec.decode(store.rows(self._layer, places))
        return torch.where(top_k < 0, top_k, torch.arange(count, device=top_k.device))


def sparse_cache(config: Any, codec: CacheCodec, store: SparseCache | None = None) -> DynamicCache:  # noqa: ANN401
    """Return an empty cache with a `SparseLayer` for each C4 layer; the model needs `hook_indexers`."""
    cache = DynamicCache(config=config)
    for layer, kind in enumerate(config.layer_types):
        if kind == SPARSE:
            cache.layers[layer] = SparseLayer(config, codec.row_codec(C4), layer, store)
    return cache


def hook_indexers(model: Model) -> list[Any]:
    """Make every indexer hand its selection to the `SparseLayer`, and return the hooks. Dense caches stay as they are."""

    def select(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], top_k: torch.Tensor) -> Any:  # noqa: ANN401
        cache = named.get(CACHE_ARGUMENT, arguments[3] if len(arguments) > 3 else None)
        layer = named.get("layer_idx", arguments[4] if len(arguments) > 4 else None)
        held = cache.layers[layer] if cache is not None else None
        return held.select(top_k) if isinstance(held, SparseLayer) else None  # None leaves the result unchanged

    indexers = [module for name, module in model.named_modules() if name.endswith(".compressor.indexer")]
    return [module.register_forward_hook(select, with_kwargs=True) for module in indexers]


class SparseDecoder(Closing):
    """A model and the hot buffer of its requests, for one thread. To end a request, release its slot in `store`."""

    def __init__(self, model: Model, codec: CacheCodec, store: SparseCache) -> None:
        """Raises InvalidInputError when the hot buffer was made for another model."""
        self._model, self._codec, self.store = model, codec, store
        self._component = codec.geometry.component(C4)
        if store.layers != self._component.layers or store.settings.top_k < model.config.index_topk:
            raise InvalidInputError(
                f"{store!r} holds layers {store.layers} and up to {store.settings.top_k} selected rows; the model has C4 layers "
                f"{self._component.layers} and selects {model.config.index_topk}"
            )
        self._hooks = hook_indexers(model)

    def admit(self, slot: int, tables: Tables, read: ReadRows, *, tokens: int, shared_tokens: int = 0) -> DynamicCache:
        """Begin a request of `tokens` tokens; return its cache, which takes the first token of its answer next.

        `tables`: the request's pages; `read` reads their rows. `shared_tokens`: tokens that this node held already
        (`held_by_decode` of the room). Raises the errors of `SparseCache.admit` and `CacheCodec.decode`.
        """
        table = tables.get(IndexSpace.HOST)
        if table is None:
            raise InvalidInputError("the request has no pages in the host pool; sparse decode needs c4_kv there")
        into = sparse_cache(self._model.config, self._codec, self.store)
        cache = self._codec.decode(tokens, read, into=into)
        ids, rows = table.require(IndexSpace.HOST), tokens // self._component.tokens_per_row
        shared_pages = shared_tokens // self._codec.geometry.tokens_per_page
        self.store.admit(slot, ids, rows, shared_pages=shared_pages)
        return cache

    def step(self, slot: int, cache: DynamicCache, *, token: int) -> torch.Tensor:
        """Feed one token; return the fp32 logits [vocabulary] of the next.

        Raises InvalidInputError, with nothing changed, when the request has no host page for the row that this token completes;
        then `SparseCache.extend` helps. After any other error, release the request.
        """
        self.store.begin_step([(slot, (cache.get_seq_length() + 1) // self._component.tokens_per_row)])
        try:
            return forward(self._model, cache, [token])
        finally:
            self.store.end_step()

    def close(self) -> None:
        """Take the hooks off the model. The owner closes the hot buffer."""
        for hook in self._hooks:
            hook.remove()
