"""Prefixes in host memory: what engines are told to load, when others share it, and that nothing of a load stays behind."""

from __future__ import annotations

from itertools import count

import pytest

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import Abort
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner
from kvbridge.telemetry.host_tier import CopyEnded
from kvbridge.tier.keys import Keys, page_keys
from tests.helpers.prefix_bench import FULL, HISTORY, PAGE, SWA, PrefixBench, hashes
from tests.helpers.rooms import DECODE, PREFILL, R0, R1
from tests.unit.node.test_shared_prompts import IDENTITY as DECODE_IDENTITY
from tests.unit.node.test_shared_prompts import TOKENS
from tests.unit.node.test_shared_prompts import Bench as SharedBench

FULL_TWIN, SWA_TWIN = IndexSpace.FULL_TWIN, IndexSpace.SWA_TWIN
POINT = StreamPoint(ring="load", handle=bytes(64), device_uuid="0" * 32)
_copies = count(1)


def back_up(cache, keys: Keys) -> None:
    """All of a prompt comes to the host."""
    backup = cache.twins.start_backup(Owner(NO_ROOM, next(_copies)), keys.in_namespace(""), at_most=99)
    assert backup is not None
    cache.twins.end_backup(backup, done=True)


def push_out(book, cache, leave: int = 0) -> None:
    """Let something else need the device: all that nobody reads but so many pages."""
    other = Owner(10**6, 1)
    spaces = {FULL: leave, SWA: 0}
    available = book.available_pages()
    book.reserve(other, {space: available[space] - left for space, left in spaces.items() if space in available})
    book.free(other)
    cache.check_integrity()


def load_of(pages) -> dict[IndexSpace, tuple[int, list[int]]]:
    return {space: (table.first_page, table.ids.tolist()) for space, table in tables_from_wire(pages.load).items()}


# ------------------------------------------------------------------------------------------- prefill


class Bench(PrefixBench):
    """A prefill node with a host tier, whose device forgets."""

    def __init__(self, **fields) -> None:
        super().__init__(twins=(32, 8), **fields)

    def keys(self, tokens) -> Keys:
        return Keys(hashes(tokens))

    def on_host(self, room: int, tokens: list[int], *, leave: int = 0) -> None:
        """A prompt is kept, has come to the host, and the device has but so many pages of it left."""
        self.cross(room, tokens)
        back_up(self.cache, self.keys(tokens))
        push_out(self.book, self.cache, leave)

    def load(self, room: int) -> None:
        """The engine's part: enqueued behind a point."""
        self.verbs.publish(
            "engine",
            self.ranks,
            room,
            upto_token=self.service.book.get(room).computed_tokens,
            layers=None,
            after={str(rank): POINT for rank in self.ranks},
        )
        self.verbs.loaded("engine", room, self.ranks, bytes=100, seconds=0.5)

    def after_load(self, room: int, tokens: list[int]) -> None:
        """Compute the rest, send it."""
        begun = self.begin(room, tokens)
        self.load(room)
        self.publish(room, tokens)
        self.finish(room, tuple(one.tokens for one in begun.checkpoints))


def test_restorable_places_are_those_of_the_host_too_and_a_room_can_start_before_them():
    bench = Bench(part_of_instance=True)
    bench.on_host(1, HISTORY[: 2 * PAGE])
    bench.cross(2, HISTORY[: 4 * PAGE + 5])
    back_up(bench.cache, bench.keys(HISTORY[: 4 * PAGE]))
    push_out(bench.book, bench.cache)
    bench.admit(3, HISTORY[: 5 * PAGE])
    assert bench.restorable(3) == (0, 2 * PAGE, 4 * PAGE)
    begun = bench.begin(3, HISTORY[: 5 * PAGE], at_most=3 * PAGE)
    assert (begun.computed_tokens, begun.host_tokens) == (2 * PAGE, 2 * PAGE)
    assert load_of(begun)[FULL_TWIN][0] == 0
    assert [len(twins) for _, twins in load_of(begun).values()] == [2, 1]
    assert begun.restore is not None
    assert begun.restore.tokens == 2 * PAGE
    bench.check()
    bench.load(3)
    with pytest.raises(ConflictError, match="goes backwards"):
        bench.publish(3, HISTORY[:PAGE])
    bench.verbs.abort("engine", 3, "enough")
    bench.quiet()


def test_a_room_can_start_where_nothing_is_to_be_loaded():
    bench = Bench(part_of_instance=True)
    bench.on_host(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    begun = bench.begin(2, HISTORY[:1500], at_most=0)
    assert (begun.computed_tokens, begun.host_tokens, begun.load, begun.restore) == (0, 0, (), None)
    bench.publish(2, HISTORY[:1500])
    bench.check()
    bench.verbs.abort("engine", 2, "enough")
    bench.quiet()


def test_each_rank_loads_and_publishes_for_itself():
    bench = Bench(ranks=(R0, R1))
    bench.on_host(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    bench.offer(2, HISTORY[:1500])
    for rank in (R0, R1):
        assert load_of(bench.begin(2, HISTORY[:1500], ranks=(rank,)))[FULL_TWIN][0] == 0
    bench.verbs.publish("engine", (R0,), 2, upto_token=768, layers=None, after={str(R0): POINT})
    bench.verbs.loaded("engine", 2, (R0,))
    ordered = [(rank, message) for rank, message in bench.workers.messages if message in bench.orders(2)]
    orders = [(rank, order.section.stop_token) for rank, order in ordered]
    assert orders == [(R0, 768)]
    assert bench.service.book.get(2).load.ranks == {R0}


def test_an_abort_by_decode_keeps_what_the_engine_has_finished():
    bench = Bench()
    bench.on_host(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    bench.offer(2, HISTORY[:1500])
    bench.after_load(2, HISTORY[:1500])
    bench.service.peers.hear(DECODE, Abort(room=2, generation=1, code="aborted", message="enough"))
    bench.closed(2)
    assert bench.admit(3, HISTORY[:2000]).computed_tokens == 1280
    bench.check()


# ------------------------------------------------------------------------------------------- decode


class DecodeBench(SharedBench):
    """A decode node whose prefixes have come to the host."""

    def __init__(self) -> None:
        super().__init__(twins=32)

    def on_host(self, room: int, tokens: int, *, leave: int = 0) -> None:
        self.whole(room, tokens)
        back_up(self.prefixes, keys_of(tokens))
        push_out(self.book, self.prefixes, leave)

    def committed(self, room: int, tokens: int):
        found = self.admit(room, tokens)
        self.done(found)
        assert found.shown is RoomState.COMMITTED
        return found

    def claim_pages(self, room):
        return self.verbs.claim_pages("engine", room.room, keys_of(room.prompt_tokens).data)

    def on_device(self, tokens: int) -> int:
        """Pages of the prompt of so many tokens that a room would have to load nothing of."""
        found = self.admit(10**5 + next(_copies), tokens)
        told = (found.prefix_tokens - found.host_tokens) // PAGE
        self.service.driver.stop(found, "only asked")
        self.service.peers.hear(PREFILL, drained(found.room))
        return told


def drained(room: int):
    from kvbridge.core.wire.messages import Drained

    return Drained(room=room, generation=1, in_transit=False)


def keys_of(tokens: int) -> Keys:
    return page_keys(DECODE_IDENTITY, TOKENS[:tokens])


@pytest.fixture
def decode():
    bench = DecodeBench()
    yield bench
    bench.prefixes.check_integrity()


def test_what_decode_has_loaded_is_shared_at_once_and_so_is_what_follows(decode):
    decode.on_host(1, 3 * PAGE)
    room = decode.committed(2, 5 * PAGE)
    assert decode.on_device(5 * PAGE) == 0, "it cannot be reached before what is before it is loaded"
    decode.claim(room)
    assert decode.on_device(5 * PAGE) == 0
    decode.verbs.loaded("engine", 2)
    assert decode.on_device(5 * PAGE) == 5
    sibling = decode.committed(3, 6 * PAGE)
    assert sibling.tables[FULL].ids[:5].tolist() == room.tables[FULL].ids[:5].tolist()
    decode.verbs.loaded("engine", 2)  # once more
    decode.verbs.loaded("engine", 3)  # of a room that loads nothing
    decode.verbs.loaded("engine", 4)  # nobody knows it
    decode.verbs.release("engine", 2)
    decode.prefixes.check_integrity()


def test_pages_are_shared_when_they_are_loaded_on_every_rank(decode):
    decode.ranks.layers[R1] = decode.ranks.layers[R0]
    decode.on_host(1, 3 * PAGE)
    room = decode.committed(2, 4 * PAGE)
    decode.claim(room)
    decode.verbs.loaded("engine", 2, (R0,), bytes=10, seconds=0.5)
    decode.verbs.loaded("engine", 2, (R0,))
    assert room.load is not None
    assert decode.on_device(4 * PAGE) == 0
    decode.verbs.loaded("engine", 2, (R1,), bytes=20, seconds=0.25)
    assert (room.load, decode.on_device(4 * PAGE)) == (None, 4)
    told = [fact for fact in decode.events.facts if isinstance(fact, CopyEnded)]
    assert [(fact.direction, fact.pages, fact.bytes, fact.busy_s) for fact in told] == [("load_back", 3, 30, 0.5)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_load_that_fails_is_told_and_an_engine_that_gives_up_for_another_reason_is_none(decode, fails):
    decode.on_host(1, 3 * PAGE)
    room = decode.committed(2, 4 * PAGE)
    decode.claim(room)
    decode.verbs.abort("engine", 2, "the device is full", load_failed=fails)
    told = [fact for fact in decode.events.facts if isinstance(fact, CopyEnded)]
    expected = [("load_back", 3, "transport_failed", "the device is full")] if fails else []
    assert [(fact.direction, fact.pages, fact.code, fact.reason) for fact in told] == expected


def test_an_answer_stays_behind_what_was_loaded(decode):
    decode.on_host(1, 2 * PAGE)
    room = decode.committed(2, 2 * PAGE + 5)
    decode.claim(room)
    decode.verbs.loaded("engine", 2)
    decode.verbs.release("engine", 2, valid_tokens=3 * PAGE, page_hashes=keys_of(3 * PAGE).data)
    assert decode.on_device(4 * PAGE) == 3
