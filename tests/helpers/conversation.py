"""Requests of conversations through running daemons: each byte follows from the keys of pages, so bytes of another are seen."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, Self

from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine import DecodeEngine, DecodeRoom, Engine, PrefillEngine, PrefillRoom, Room
from kvbridge.tier.keys import Keys
from tests.helpers import synthetic
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, ends, report
from tests.helpers.obedient_engines import write_answer

PAGE = 256
"""Tokens, of the tiny models."""
MODEL = {"enabled": True, "model_name": "tiny", "model_revision": "1"}
TIER = {"tier": MODEL}
CLAIM_S = 30.0


def tokens_of(number: int, count: int) -> list[int]:
    return [number * 100_000 + place for place in range(count)]


def named(keys: Keys) -> dict[str, str]:
    return {"page_hashes": base64.b64encode(keys.data).decode()}


def begin(engine: PrefillEngine, room: int, tokens: int, keys: Keys, **asked: Any) -> PrefillRoom:
    """Begin a room, and compare every byte that the engine starts from, windows and states included."""
    begun = engine.begin(room, prompt_tokens=tokens, page_keys=keys, **asked)
    _wait_layers(begun, **asked)
    if begun.held_by_prefill:
        _compare(engine, room, begun.restore, begun.held_by_prefill, keys)
    return begun


def compute(engine: PrefillEngine, begun: PrefillRoom, keys: Keys, *, checkpoints: bool = True) -> int:
    """Write and publish what is new, cut where checkpoints are wanted, and finish; return bytes written, without checkpoints."""
    start, written, wanted = begun.held_by_prefill, 0, begun.checkpoints if checkpoints else {}
    for stop in [*wanted, begun.prompt_tokens]:
        section = Section(prompt_tokens=begun.prompt_tokens, start_token=start, stop_token=stop)
        at_end = Section(prompt_tokens=stop, prefix_tokens=stop, start_token=0, stop_token=stop)
        for views in engine.views.values():
            written += synthetic.fill(views, room=begun.id, tables=begun.tables, section=section, keys=keys)
            if stop in wanted:
                synthetic.fill(views, room=begun.id, tables=wanted[stop], section=at_end, keys=keys)
        begun.publish(stop)
        start = stop
    begun.finish(checkpoints=list(wanted))
    return written


def read(engine: DecodeEngine, room: int, tokens: int, keys: Keys, **asked: Any) -> DecodeRoom:
    claimed = engine.claim(room, timeout_s=CLAIM_S, page_keys=keys, **asked)
    _wait_layers(claimed, **asked)
    _compare(engine, room, claimed.tables, tokens, keys)
    return claimed


def _wait_layers(room: Room, *, by_layer: bool = False, **_: Any) -> None:
    for rank in room.engine.ranks if by_layer else ():
        for layer in room.engine.layers(rank):
            room.wait_layer(layer)


def _compare(engine: Engine, room: int, tables: Tables, tokens: int, keys: Keys) -> None:
    for views in engine.views.values():
        found = synthetic.compare(views, room=room, tables=tables, tokens=tokens, keys=keys)
        assert found.checked_bytes
        assert not found.wrong_bytes, found.mismatches[0]


def owed_bytes(geometry: ModelGeometry, tokens: int, prefix_tokens: int, *, ranks: int = 1) -> int:
    """The geometry's own sum for a prompt of which decode holds so much; pages that are sent whole take their padding along."""
    found = 0
    for part in geometry.components:
        rows, each = part.live_rows(tokens, prefix_tokens), part.rows_per_logical_page
        for page in range(rows.start // each, -(-rows.stop // each)):
            inside = min(rows.stop, (page + 1) * each) - max(rows.start, page * each)
            page_bytes = part.page_bytes() if inside == part.slots_per_page else inside * part.row_bytes * part.lanes
            found += page_bytes * len(part.layers) * (1 if part.host_capable else ranks)
    return found


@dataclass
class Conversation:
    live: LiveCluster
    number: int
    common: list[int] = field(default_factory=list)
    """Tokens of another conversation, with which this one begins."""
    by_layer: bool = False
    """Whether engines wait for each layer that is loaded instead of for all of them."""

    def keys(self, tokens: int) -> Keys:
        return self.live.sender.page_keys((self.common + tokens_of(self.number, tokens))[:tokens])

    def parts(self, tokens: int, number: int) -> Conversation:
        """Return another conversation that begins with so many tokens of this one."""
        return Conversation(self.live, number, (self.common + tokens_of(self.number, tokens))[:tokens])

    def turn(self, tokens: int, more: int = 0, **asked: Any) -> Turn:
        """Have a request paired by bootstrap; nothing else is done of it. `more`: tokens of its answer."""
        keys = self.keys(tokens)
        return Turn(self, self.live.ticket(tokens, max_new_tokens=more, **named(keys), **asked)["room"], tokens, keys)

    def cross(self, tokens: int, *, checkpoints: bool = True, **asked: Any) -> Turn:
        turn = self.turn(tokens, **asked)
        turn.compute(checkpoints=checkpoints)
        turn.read()
        turn.release()
        turn.end()
        return turn


@dataclass
class Turn:
    talk: Conversation
    room: int
    tokens: int
    keys: Keys
    begun: PrefillRoom | None = None
    claimed: DecodeRoom | None = None
    written_bytes: int = 0

    def begin(self) -> PrefillRoom:
        sender = self.talk.live.sender
        self.begun = begin(sender, self.room, self.tokens, self.keys, by_layer=self.talk.by_layer)
        return self.begun

    def compute(self, *, checkpoints: bool = True) -> None:
        assert self.talk.live.reader  # attached before the commit is told
        begun = self.begun or self.begin()
        self.written_bytes = compute(self.talk.live.sender, begun, self.keys, checkpoints=checkpoints)

    def read(self) -> Self:
        reader = self.talk.live.reader
        self.claimed = read(reader, self.room, self.tokens, self.keys, by_layer=self.talk.by_layer)
        return self

    def release(self, answered: int = 0) -> None:
        """Let go of it on decode. `answered`: tokens of the prompt and of an answer that the engine writes before."""
        assert self.claimed is not None
        if not answered:
            self.claimed.release()
            return
        keys = self.talk.keys(answered)
        write_answer(self.talk.live.reader, self.claimed.tables, keys, self.tokens)
        self.claimed.release(valid_tokens=answered, page_keys=keys)

    def end(self) -> None:
        """Wait until neither side has pages of it; receipts say what the engines were told."""
        live = self.talk.live
        ends(live.prefill, self.room, "completed")

        def over() -> bool:
            live.sender.events()  # engines with a GPU say so what they still have to
            live.reader.events()
            return not any(report(daemon, self.room)["pages"] for daemon in live.nodes)

        eventually("let go", over)
        receipts = [report(daemon, self.room) for daemon in live.nodes]
        assert receipts[0]["computed_tokens"] == self.reused[0]
        assert [receipt["prefix_tokens"] for receipt in receipts] == [self.reused[1]] * 2
        assert tuple(receipt["host_tokens"] for receipt in receipts) == self.from_host

    def abort(self, reason: str = "a test") -> None:
        """Have the prefill engine give it up, and wait for its end on decode."""
        self.talk.live.sender.abort(self.room, reason)
        ends(self.talk.live.decode, self.room, "failed", "aborted")

    @property
    def reused(self) -> tuple[int, int]:
        """Tokens from which prefill's engine went on, and tokens that decode was not sent."""
        assert self.begun is not None
        assert self.claimed is not None
        return self.begun.held_by_prefill, self.claimed.held_by_decode

    @property
    def from_host(self) -> tuple[int, int]:
        assert self.begun is not None
        assert self.claimed is not None
        return self.begun.host_tokens, self.claimed.host_tokens

    @property
    def sent_bytes(self) -> int:
        assert self.claimed is not None
        return sum(amount.bytes for amount in self.claimed.amounts.values())
