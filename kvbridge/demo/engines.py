"""The demo's prefill engine, its decode engine, and the model alone that they are compared with. Each has a process of its own.

Answers are facts for the report (JSON by the names that `--json` shows), and logits as numpy arrays [positions, vocabulary].
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConflictError, RoomFailedError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.ids import IndexSpace, Tables
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.demo.options import DemoOptions
from kvbridge.demo.prompts import Order, Text
from kvbridge.demo.reference import SelectedAttention
from kvbridge.engine import DecodeEngine, DecodeRoom, Engine, PrefillEngine
from kvbridge.engine.adapters.deepseek_v4 import (
    CacheCodec,
    Placement,
    PrefillPacker,
    append,
    reencoded,
    replace_entries,
    unpack,
)
from kvbridge.engine.adapters.sparse_deepseek_v4 import SparseDecoder, SparseRequest, reencoding_cache
from kvbridge.engine.adapters.transformers import decode_step, generate, load_model, prefill_chunks, weights_digest
from kvbridge.sparse import SparseCache
from kvbridge.tier.keys import NO_KEYS, Keys

IDLE_WAIT_S = 0.2
QUIET_S = 10.0

Facts: TypeAlias = dict[str, Any]
Logits: TypeAlias = npt.NDArray[np.float32]
Cache: TypeAlias = Any


class Model(Closing):
    """The model with random weights that every process loads."""

    def __init__(self, options: DemoOptions) -> None:
        """Raises InvalidInputError or UnsupportedError for what the demo cannot run."""
        self.options = options
        device = torch.device(options.torch_device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(
                f"--device cuda: torch {torch.__version__} cannot use a GPU here; install a build of torch with CUDA, or leave "
                "--device out"
            )
        dtype = getattr(torch, options.dtype)
        self.model = load_model(options.facts, dtype=dtype, device=device)
        self.codec = CacheCodec(options.geometry, self.model.config, dtype=dtype, device=device)
        self.weights = weights_digest(self.model)
        self.loaded = {"weights": self.weights} | {
            package: importlib.metadata.version(package) for package in ("torch", "transformers")
        }
        self._closing = ExitStack()

    def keys(self, engine: Engine, tokens: Text) -> Keys:
        """Return the page keys of tokens whose pages are to stay."""
        return engine.page_keys(tokens) if self.options.turns else NO_KEYS

    def close(self) -> None:
        """Detach from the daemon."""
        self._closing.close()


class Prefill(Model):
    """The prefill engine."""

    def attach(self, runtime_dir: Path) -> None:
        """Attach to the daemon."""
        self.engine = self._closing.enter_context(PrefillEngine.attach(runtime_dir))

    def serve(self, orders: Sequence[Order]) -> list[tuple[Facts, Logits]]:
        """Compute prompts into the pages of their rooms, one after another."""
        return [self._serve(order) for order in orders]

    def _serve(self, order: Order) -> tuple[Facts, Logits]:
        engine, prompt, room = self.engine, order.prompt, order.room
        begun = engine.begin(room, prompt_tokens=len(prompt), page_keys=self.keys(engine, prompt))
        computed, views = begun.held_by_prefill, engine.views.values()
        packer = PrefillPacker(
            self.codec,
            Placement(views, begun.tables),
            prompt_tokens=len(prompt),
            computed_tokens=computed,
            checkpoints=begun.checkpoints,
        )

        def publish(held: Cache, upto: int) -> None:
            packer.advance(held)
            begun.publish(upto)

        cache = unpack(self.codec, Placement(views, begun.restore), tokens=computed) if computed else None
        chunk_tokens = self.options.chunk_tokens
        made = prefill_chunks(self.model, prompt, chunk_tokens=chunk_tokens, on_chunk=publish, cache=cache)
        logits = _array(made.logits[None])
        facts = {
            "prefilled_s": time.monotonic(),
            "computed_tokens": computed,
            "computed_host_tokens": begun.host_tokens,
            "source_pages": _page_ids(begun.tables),
        }
        note = json.dumps([order.number, made.first_token, self.weights]).encode()
        begun.finish(metadata=note, checkpoints=packer.checkpointed)
        for event in engine.events():
            _check_alive(event, "prefill")
        return facts, logits


@dataclass
class _Decoding:
    """One request that tokens are being generated for."""

    order: Order
    claimed: DecodeRoom
    cache: Cache
    sparse: SparseRequest | None
    tokens: list[int]
    """Fed so far, and the next one to feed."""
    facts: Facts
    logits: list[torch.Tensor] = field(default_factory=list)


class Decode(Model):
    """The decode engine."""

    def attach(self, runtime_dir: Path) -> None:
        """Attach to the daemon, and make the hot buffer if decode is sparse."""
        self.engine = engine = self._closing.enter_context(DecodeEngine.attach(runtime_dir))
        self._decoder: SparseDecoder | None = None
        if (settings := self.options.hot_buffer) is not None:
            component = self.codec.geometry.component(ComponentKind.C4_KV)
            regions = [
                views.region(component.kind, layer, space=IndexSpace.HOST).region
                for views in engine.views.values()
                for layer in views.layers(component.kind)
            ]
            store = self._closing.enter_context(SparseCache(settings, component, regions, self.codec.device))
            self._decoder = self._closing.enter_context(SparseDecoder(self.model, self.codec, store))

    def serve(self, orders: Sequence[Order]) -> list[tuple[Facts, Text, Logits]]:
        """Claim rooms as they arrive, take one step after another for every request that is here, and release them."""
        expected = {order.room: order for order in orders}
        active: list[_Decoding] = []
        found: dict[int, tuple[Facts, Text, Logits]] = {}
        while len(found) < len(orders):
            for event in self.engine.events(0.0 if active else IDLE_WAIT_S):
                _check_alive(event, "decode")
                if event.kind == "committed":
                    active.append(self._claim(expected[event.room]))
            for each in active:
                self._step(each)
            for each in [each for each in active if len(each.logits) == self.options.step_count]:
                active.remove(each)
                found[each.order.number] = self._release(each)
        self.engine.events(IDLE_WAIT_S)  # on a GPU, releases are sent once it is through with the pages
        return [found[order.number] for order in orders]

    def _step(self, each: _Decoding) -> None:
        if each.sparse is not None and self._decoder is not None:
            each.logits.append(self._decoder.step(each.sparse, token=each.tokens[-1]))
        else:
            each.logits.append(decode_step(self.model, each.cache, token=each.tokens[-1]))
        each.tokens.append(int(each.logits[-1].argmax()))

    def _claim(self, order: Order) -> _Decoding:
        """Claim a committed room and take its cache out of the pages."""
        claimed = self.engine.claim(order.room, page_keys=self.keys(self.engine, order.prompt))
        facts = {
            "claimable_s": time.monotonic() - claimed.phases_s.get("commit_to_claim", 0.0),
            "prefix_tokens": claimed.held_by_decode,
            "prefix_host_tokens": claimed.host_tokens,
            "arrived_bytes": {kind.value: amount.bytes for kind, amount in claimed.amounts.items()},
            "destination_pages": _page_ids(claimed.tables),
        }
        notes = set(claimed.metadata.values())
        if len(notes) != 1:
            raise ConflictError(
                f"room {order.room}: prefill ranks {sorted(claimed.metadata)} sent different first tokens"
            )
        number, first_token, weights = json.loads(notes.pop())
        if (number, weights) != (order.number, self.weights):
            raise ConflictError(
                f"room {order.room} was to bring request {order.number} of weights {self.weights}, and brought {number} of "
                f"{weights}; two releases of torch or transformers?"
            )
        placement, tokens = Placement(self.engine.views.values(), claimed.tables), claimed.prompt_tokens
        if self._decoder is None:
            cache, sparse = unpack(self.codec, placement, tokens=tokens), None
        else:
            slot = self._decoder.store.requests.free_slot()
            sparse = self._decoder.admit(slot, placement, tokens=tokens, shared_tokens=claimed.held_by_decode)
            cache = sparse.cache
        return _Decoding(order, claimed, cache, sparse, [first_token], facts)

    def _release(self, each: _Decoding) -> tuple[Facts, Text, Logits]:
        """Write the rows of the answer into the pages, and give them back."""
        order, fed, rows = each.order, tuple(each.tokens[:-1]), None
        placement = Placement(self.engine.views.values(), each.claimed.tables)
        append(self.codec, each.cache, placement, from_token=len(order.prompt))
        if each.sparse is not None and self._decoder is not None:
            store, slot = self._decoder.store, each.sparse.request_slot
            counts, per_row = store.counts(slot), store.component.tokens_per_row
            steps = range(len(order.prompt) + 1, each.sparse.tokens + 1)
            selected = sum(min(store.settings.top_k, tokens // per_row) for tokens in steps) * len(store.layers)
            each.facts["sparse"] = {
                "selected": selected,
                "in_hot_slots": counts.hits,
                "loaded": counts.loaded,
                "rows": each.sparse.tokens // per_row,
            }
            released = store.release(slot)
            released.wait(QUIET_S)
            rows = released.rows()
        stated = order.prompt + fed
        keys = self.keys(self.engine, stated)
        each.claimed.release(valid_tokens=len(stated), page_keys=keys, sparse=rows)
        return each.facts, fed, _array(torch.stack(each.logits))


class Alone(Model):
    """The model in one process and without kvbridge."""

    def __init__(self, options: DemoOptions) -> None:
        super().__init__(options)
        self._after: dict[int, Cache] = {}
        """The cache of each request after its answer."""

    def compute(self, questions: Sequence[tuple[int, Text, int, int]]) -> list[tuple[Facts, Logits]]:
        """Compute prompts and generate: (number, prompt, the request that it continues, tokens that decode had kept)."""
        return [self._compute(*question) for question in questions]

    def _compute(self, number: int, prompt: Text, previous: int, kept_tokens: int) -> tuple[Facts, Logits]:
        """Generate from a cache as decode gets it out of rows, with the rows of the answer before that decode had kept."""
        options, config = self.options, self.model.config
        made = prefill_chunks(self.model, prompt, chunk_tokens=options.chunk_tokens)
        cache = made.cache
        if options.sparse or kept_tokens or options.encoding.value != Encoding.NATIVE.value:
            into = reencoding_cache(config, self.codec) if options.sparse else None
            cache = reencoded(self.codec, cache, into=into)
        if kept_tokens:
            replace_entries(self.codec, cache, self._after[previous], tokens=kept_tokens)
        attention = SelectedAttention(self.model)
        with attention if options.sparse else nullcontext():
            ours = generate(self.model, cache, first_token=made.first_token, steps=options.step_count)
        if options.keep_answers:
            self._after[number] = cache
        share = attention.share_of_rounding if options.sparse else None
        return {"share_of_rounding": share}, _array(torch.cat([made.logits[None], ours.logits]))


def _check_alive(event: RoomEvent, side: str) -> None:
    if event.kind in {"aborted", "failed"}:
        raise RoomFailedError(f"room {event.room} {event.kind} on {side}: {event.reason}")


def _page_ids(tables: Tables) -> dict[str, list[int]]:
    return {space.value: table.ids.tolist() for space, table in tables.items()}


def _array(logits: torch.Tensor) -> Logits:
    found: Logits = logits.float().cpu().numpy()
    return found
