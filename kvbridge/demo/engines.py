"""The demo's prefill engine, its decode engine, and the model alone that they are compared with. Each has a process of its own.

Answers are facts for the report, by the names that `--json` shows, and logits as numpy arrays [positions, vocabulary].

Logits are compared bit by bit: two processes on one machine that do the same operations in the same order get the same bits. In
one place sparse decode does not. It sums over the selected entries of a C4 layer in the order of the selection; the dense model
sums over all, where others have the weight zero. The difference in rounding is enough for an indexer, a router or a quantised
row to fall to the other side of a tie later on: two right runs then part for good, and no tolerance of logits is right for all.
Therefore the model alone takes the order of this one sum from sparse decode: it gathers the selected entries from its own whole
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.errors import ConflictError, RoomFailedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, Tables
from kvbridge.demo.plan import CHUNK_TOKENS, Plan, RowEncoding, Text
from kvbridge.engine import DecodeEngine, DecodeRoom, PrefillEngine
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, read_parts, reencoded
from kvbridge.engine.adapters.transformers import (
    SparseDecoder,
    forward,
    generate,
    hook_indexers,
    load_model,
    prefill_chunks,
    sparse_cache,
)
from kvbridge.sparse import SparseCache
from kvbridge.tier.keys import NO_KEYS, Keys

IDLE_WAIT_S = 0.2
QUIET_S = 10.0

Facts: TypeAlias = dict[str, Any]
Logits: TypeAlias = npt.NDArray[np.float32]


class Model(ExitStack):
    """The model with random weights that every process loads. An engine detaches from its daemon when the stack closes."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.model = load_model(plan.facts, dtype=getattr(torch, plan.dtype), device=torch.device(plan.device))
        self.codec = CacheCodec(plan.geometry, self.model)

    def keys(self, engine: PrefillEngine | DecodeEngine, prompt: Text) -> Keys:
        """Return the page keys of a prompt; none where its pages are not cached."""
        return engine.page_keys(prompt) if self.plan.options.turns else NO_KEYS


class Prefill(Model):
    """The prefill engine."""

    def attach(self, runtime_dir: Path) -> None:
        """Attach to the daemon."""
        self.engine = self.enter_context(PrefillEngine.attach(runtime_dir))

    def serve(self, prompts: Mapping[int, Text]) -> list[tuple[Facts, Logits]]:
        """Compute prompts into the pages of their rooms, one after another."""
        return [self._serve(room, prompt) for room, prompt in prompts.items()]

    def _serve(self, room: int, prompt: Text) -> tuple[Facts, Logits]:
        engine = self.engine
        begun = engine.begin(room, prompt_tokens=len(prompt), page_keys=self.keys(engine, prompt))
        computed, checkpoints = begun.held_by_prefill, list[int]()

        def publish(held: Any, upto: int) -> None:  # noqa: ANN401 - the model's cache
            self.codec.write(held, begun.final_parts(upto))
            if upto in begun.checkpoints:
                self.codec.write(held, begun.checkpoint_parts(upto))
                checkpoints.append(upto)
            begun.publish(upto)

        cache = self.codec.decode(computed, read_parts(begun.restored_parts())) if computed else None
        made = prefill_chunks(self.model, prompt, chunk_tokens=CHUNK_TOKENS, on_chunk=publish, cache=cache)
        begun.finish(metadata=str(made.first_token).encode(), checkpoints=checkpoints)
        engine.events()  # decode hears of a failure, too
        return {"computed_tokens": computed, "source_pages": _page_ids(begun.tables)}, _array(made.logits[None])


@dataclass
class _Decoding:
    """A request for which tokens are being generated."""

    claimed: DecodeRoom
    tokens: list[int]
    """Tokens that were fed, and the next one to feed."""
    cache: Any
    slot: int
    """The request's slot in the hot buffer, if there is one."""
    logits: list[torch.Tensor] = field(default_factory=list)


class Decode(Model):
    """The decode engine."""

    _decoder: SparseDecoder | None = None

    def attach(self, runtime_dir: Path) -> None:
        """Attach to the daemon, and make the hot buffer if decode is sparse."""
        self.engine = engine = self.enter_context(DecodeEngine.attach(runtime_dir))
        if (settings := self.plan.hot_buffer) is not None:
            component = self.codec.geometry.component(ComponentKind.C4_KV)
            regions = [
                views.region(component.kind, layer, space=IndexSpace.HOST).region
                for views in engine.views.values()
                for layer in views.layers(component.kind)
            ]
            store = self.enter_context(SparseCache(settings, component, regions, self.codec.device))
            self._decoder = self.enter_context(SparseDecoder(self.model, self.codec, store))

    def serve(self, prompts: Mapping[int, Text]) -> list[tuple[Facts, Text, Logits]]:
        """Claim rooms as they arrive, generate a token for every claimed request in turn, and release them."""
        active: list[_Decoding] = []
        found: dict[int, tuple[Facts, Text, Logits]] = {}
        while len(found) < len(prompts):
            for event in self.engine.events(0.0 if active else IDLE_WAIT_S):
                if event.kind in {"aborted", "failed"}:
                    raise RoomFailedError(f"room {event.room} {event.kind} on decode: {event.reason}")
                if event.kind == "committed":
                    active.append(self._claim(event.room, prompts[event.room]))
            for each in active:
                if self._decoder is None:
                    each.logits.append(forward(self.model, each.cache, each.tokens[-1:]))
                else:
                    each.logits.append(self._decoder.step(each.slot, each.cache, token=each.tokens[-1]))
                each.tokens.append(int(each.logits[-1].argmax()))
            for each in [each for each in active if len(each.logits) == self.plan.steps]:
                active.remove(each)
                found[each.claimed.id] = self._release(each)
        self.engine.events(IDLE_WAIT_S)  # on a GPU, releases are sent when it has passed the pages
        return [found[room] for room in prompts]

    def _claim(self, room: int, prompt: Text) -> _Decoding:
        """Claim a committed room and take its cache out of the pages."""
        claimed = self.engine.claim(room, page_keys=self.keys(self.engine, prompt))
        notes = set(claimed.metadata.values())
        if len(notes) != 1:
            raise ConflictError(f"room {room}: prefill ranks {sorted(claimed.metadata)} sent different first tokens")
        read, tokens, slot = read_parts(claimed.parts()), claimed.prompt_tokens, 0
        if self._decoder is None:
            cache = self.codec.decode(tokens, read)
        else:
            slot = self._decoder.store.requests.free_slot()
            shared_tokens = claimed.held_by_decode
            cache = self._decoder.admit(slot, claimed.tables, read, tokens=tokens, shared_tokens=shared_tokens)
        return _Decoding(claimed, [int(notes.pop())], cache, slot)

    def _release(self, each: _Decoding) -> tuple[Facts, Text, Logits]:
        """Give the pages of a request back."""
        claimed, fed, rows = each.claimed, tuple(each.tokens[:-1]), None
        facts: Facts = {
            "prefix_tokens": claimed.held_by_decode,
            "arrived_bytes": {kind.value: amount.bytes for kind, amount in claimed.amounts.items()},
            "destination_pages": _page_ids(claimed.tables),
        }
        if self._decoder is not None:
            released = self._decoder.store.release(each.slot)
            released.wait(QUIET_S)
            rows = released.rows()
            facts["sparse"] = {"in_hot_slots": rows.hit, "loaded": rows.loaded}
        claimed.release(sparse=rows)
        return facts, fed, _array(torch.stack(each.logits))


class Alone(Model):
    """The model in one process and without daemons."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        if plan.options.sparse:
            hook_indexers(self.model)

    def serve(self, prompts: Mapping[int, Text]) -> list[Logits]:
        """Compute prompts, and generate from a cache that went through rows as decode's does."""
        options, found = self.plan.options, []
        for prompt in prompts.values():
            cache, logits, first_token = prefill_chunks(self.model, prompt, chunk_tokens=CHUNK_TOKENS)
            if options.sparse or options.encoding is not RowEncoding.NATIVE:
                into = sparse_cache(self.model.config, self.codec) if options.sparse else None
                cache = reencoded(self.codec, cache, into=into)
            ours = generate(self.model, cache, first_token=first_token, steps=self.plan.steps)
            found.append(_array(torch.cat([logits[None], ours.logits])))
        return found


def _page_ids(tables: Tables) -> dict[str, list[int]]:
    return {space.value: table.ids.tolist() for space, table in tables.items()}


def _array(logits: torch.Tensor) -> Logits:
    found: Logits = logits.float().cpu().numpy()
    return found
