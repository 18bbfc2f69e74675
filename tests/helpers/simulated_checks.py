"""What must be true of the two nodes of `room_simulation` at every moment."""

from __future__ import annotations

from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.decode import DecodeState
from kvbridge.node.decode.room import DecodeRoom
from kvbridge.pool.accounts.pages import Owner, PageState
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.rooms import PAGE
from tests.helpers.simulated_memory import Memory, keys_of, wrong_pages
from tests.helpers.simulated_nodes import RANKS, Engines
from tests.helpers.simulated_pool import EnginePool
from tests.helpers.simulated_prefill import PrefillNode


class Checked:
    """Pages are never used twice, and what a room has been given is what its prompt says."""

    prefill: PrefillNode
    engines: Engines
    pool: EnginePool

    def check(self) -> None:
        prefill = self.prefill
        prefill.book.check_integrity()
        self.book.check_integrity()
        prefill.pool.check()
        self.pool.check()
        self._check_cached(prefill.prefixes, prefill.memory)
        self._check_cached(self.prefixes, self.memory)
        touched = {PageState.LEASED, PageState.QUARANTINED}
        for owner, _ in prefill.in_flight():
            assert prefill.book.state(owner) in touched, f"source pages of {owner} are {prefill.book.state(owner)}"
        for owner, path in prefill.in_flight() | self.on_their_way:
            if self.is_open(path):
                assert self.book.state(owner) in touched, f"destination of {owner} is {self.book.state(owner)}"
        if not self.adopted:
            for owner in prefill.engines.in_use():
                assert prefill.book.state(owner) is not PageState.FREE, f"{owner} is free while an engine writes it"
        for owner in self.engines.in_use():
            assert self.book.state(owner) in {PageState.HELD, PageState.QUARANTINED}, f"{owner} is read, not held"
        taken_for_lies = [code for code in self.events.refusals if code.startswith(("unexpected_", "foreign_"))]
        assert not taken_for_lies, "both nodes keep to the protocol, whatever crosses"
        self.events.facts.clear()
        for rooms in (self.receiver.book, prefill.service.book):
            assert rooms.open() == [room for room in rooms if not rooms._describe_state(room).final]
        for room in self.receiver.book:
            self._check_commit(room)
            if self.shares and room.owner in self.engines.in_use():
                self._check_bytes(room)

    def _check_cached(self, prefixes: PrefixCache | None, memory: Memory) -> None:
        """Pins add up, and every prefix that a next room would find holds what it says."""
        if prefixes is None:
            return
        prefixes.check_integrity()
        for generation in range(3):
            keys = keys_of(Owner(0, generation), 3 * PAGE)
            pages = prefixes.index.pages(prefixes.index.match(keys.in_namespace("")))[IndexSpace.FULL]
            tables = {IndexSpace.FULL: PageTable(IndexSpace.FULL, pages)}
            wrong = wrong_pages(memory, RANKS, tables, keys.to_list()[: len(pages)])
            assert not wrong, f"cached, and wrong: {wrong}"

    def _check_bytes(self, room: DecodeRoom) -> None:
        wrong = wrong_pages(self.memory, RANKS, room.tables, self.labels(room))
        assert not wrong, f"{room.owner} is committed, and {wrong}"

    def _check_commit(self, room: DecodeRoom) -> None:
        if room.state is not DecodeState.COMMITTED or self.prefill.incarnation not in room.writers:
            return
        if self.shares:
            self._check_bytes(room)
        assert room.owner not in {owner for owner, _ in self.prefill.in_flight() | self.on_their_way}
        assert self.prefill.ordered[room.owner] <= self.prefill.succeeded
        assert set(room.metadata) == {str(rank) for rank in RANKS}
        assert self.digest is DigestKind.NONE or room.owner in self.verified
