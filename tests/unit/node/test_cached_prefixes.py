"""Prefixes that stay: where a room starts, which checkpoints it leaves behind, and what engines load from host memory."""

from itertools import count

import pytest

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace
from kvbridge.core.wire.messages import Drained, StreamPoint
from kvbridge.pool.accounts.book import NO_ROOM, Owner
from kvbridge.telemetry.facts import CopyEnded
from tests.helpers.accounts import cached_pages
from tests.helpers.node_bench import FULL, FULL_COPY, HISTORY, KeyedDecode, NodeBench, PrefixBench, ids, keys_of
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import PAGE, R0, R1


def test_keys_of_another_namespace_find_neither_pages_nor_checkpoints():
    bench = PrefixBench()
    bench.cross(1, HISTORY[:1000])
    found = bench.admit(2, HISTORY[:1000], namespace="acme")
    assert (found.computed_tokens, bench.restorable(2)) == (0, (0,))
    assert list(found.checkpoint_causes) == list(found.checkpoints) == [768], "as of a prompt of which nothing is known"
    assert bench.admit(3, HISTORY[:1000]).computed_tokens == 768


def test_a_checkpoint_that_does_not_fit_is_left_out_and_one_that_nobody_asked_for_is_refused():
    bench = PrefixBench(windows=1)
    assert bench.cross(1, HISTORY[:1000]).checkpoints == ()
    assert bench.cross(2, HISTORY[:1500]).computed_tokens == 0
    bench.admit(3, HISTORY[:1000])
    bench.begin(3, HISTORY[:1000])
    bench.publish(3, HISTORY[:1000])
    with pytest.raises(InvalidInputError, match="did not ask for"):
        bench.finish(3, (512,))


def test_a_prefix_is_pinned_until_nothing_of_the_room_is_in_flight():
    """A transport that is not quiet may still read the shared pages."""
    bench = PrefixBench(pages=8)
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1100])
    bench.offer(2, HISTORY[:1100])
    bench.begin(2, HISTORY[:1100])
    bench.verbs.abort(room=2)
    bench.closed(2, quiet=False)
    assert bench.book.available_pages()[FULL] == 8 - 5, "the prefix and its own pages"
    bench.closed(2)
    assert bench.told(Drained)
    bench.all_is_back()


def test_nodes_of_one_instance_start_at_the_same_token():
    """Their common start is not the least of the starts that each would choose."""
    nodes = [PrefixBench(part_of_instance=True), PrefixBench(part_of_instance=True)]
    for node, turns in zip(nodes, ((300, 600, 1500), (300, 1000)), strict=True):
        for number, length in enumerate(turns):
            node.cross(1 + number, HISTORY[:length])
    tokens = HISTORY[:2000]
    for node in nodes:
        node.admit(9, tokens)
        node.offer(9, tokens)
        assert not node.orders(room=9), "the engines have yet to agree"
    assert [node.restorable(9) for node in nodes] == [(0, 256, 512, 1280), (0, 256, 768)]
    for node in nodes:
        pages = node.begin(9, tokens, at_most=256)
        assert (pages.computed_tokens, pages.restore.tokens) == (256, 256)
        assert not set(ids(pages)[1:]) & set(cached_pages(node.book)[FULL].tolist()), "it writes nobody's pages"
        assert [order.section.stop_token for order in node.orders(room=9)] == [256]
        node.publish(9, tokens)
        node.finish(9, tuple(one.tokens for one in pages.checkpoints))
        node.all_sent(9)
        assert node.report(9).computed_tokens == 256
        node.all_is_back()
        assert node.cross(10, HISTORY[:2001]).computed_tokens == 1792


def test_ranks_of_one_node_start_at_the_same_token():
    bench = PrefixBench(ranks=(R0, R1), part_of_instance=True)
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    assert bench.begin(2, HISTORY[:1500], ranks=(R0,)).computed_tokens == 768
    with pytest.raises(ConflictError, match="on another rank"):
        bench.begin(2, HISTORY[:1500], ranks=(R1,), at_most=0)
    assert bench.begin(2, HISTORY[:1500], ranks=(R1,), at_most=1000).computed_tokens == 768


@pytest.mark.parametrize("behind", [0, 1, 128])
def test_the_same_prompt_again_computes_less_than_a_page(behind: int):
    bench, tokens = PrefixBench(), HISTORY[: 3 * PAGE + behind]
    computed = [bench.cross(room, tokens).computed_tokens for room in (1, 2, 3)]
    if behind:
        assert computed == [0, 3 * PAGE, 3 * PAGE]
    else:  # the first left one at the prompt's very end, the second where it left what it knew
        assert computed == [0, 0, 2 * PAGE]
    longer = bench.cross(4, HISTORY[: 5 * PAGE])
    assert longer.computed_tokens == 3 * PAGE, "a whole prompt is a prefix, too"
    bench.all_is_back()


POINT = StreamPoint(ring="load", handle=bytes(64), device_uuid="0" * 32)
_copies = count(1)


def to_the_host(bench: NodeBench, tokens: list[int] | int, *, leave: int = 0) -> None:
    """All of a prompt comes to the host, and something else needs the device: all that nobody reads but so many pages."""
    keys = keys_of(tokens).in_namespace("")
    backup = bench.prefixes.copies.start_backup(Owner(NO_ROOM, next(_copies)), keys, at_most=99)
    bench.prefixes.copies.end_backup(backup, done=True)
    other, available = Owner(10**6, 1), bench.book.available_pages()
    needed = {FULL: available[FULL] - leave, IndexSpace.SWA: available.get(IndexSpace.SWA, 0)}
    bench.book.reserve(other, {space: pages for space, pages in needed.items() if space in available})
    bench.book.free(other)
    check_cache(bench.prefixes)


def load_of(pages) -> dict[IndexSpace, tuple[int, list[int]]]:
    return {space: (table.first_page, table.ids.tolist()) for space, table in tables_from_wire(pages.load).items()}


def on_host(tokens: list[int], **fields) -> PrefixBench:
    """A prompt has crossed, and is on the host only."""
    bench = PrefixBench(twins=32, **fields)
    bench.cross(1, tokens)
    to_the_host(bench, tokens)
    return bench


def load(bench: PrefixBench, room: int) -> None:
    after = {str(rank): POINT for rank in bench.ranks}
    bench.verbs.publish("engine", None, room, upto_token=bench.room(room).computed_tokens, after=after)
    bench.verbs.loaded("engine", room, bench.ranks, bytes=100, seconds=0.5)


def test_restorable_places_are_those_of_the_host_too_and_a_room_can_start_before_them():
    bench = on_host(HISTORY[: 2 * PAGE], part_of_instance=True)
    bench.cross(2, HISTORY[: 4 * PAGE + 5])
    to_the_host(bench, HISTORY[: 4 * PAGE])
    bench.admit(3, HISTORY[: 5 * PAGE])
    assert bench.restorable(3) == (0, 2 * PAGE, 4 * PAGE)
    begun = bench.begin(3, HISTORY[: 5 * PAGE], at_most=3 * PAGE)
    assert (begun.computed_tokens, begun.host_tokens) == (2 * PAGE, 2 * PAGE)
    assert load_of(begun)[FULL_COPY][0] == 0
    assert [len(twins) for _, twins in load_of(begun).values()] == [2, 1]
    assert begun.restore.tokens == 2 * PAGE
    load(bench, 3)
    with pytest.raises(ConflictError, match="goes backwards"):
        bench.publish(3, HISTORY[:PAGE])
    bench.verbs.abort(room=3)
    bench.all_is_back()


def test_each_rank_loads_and_publishes_for_itself():
    bench = on_host(HISTORY[:1000], ranks=(R0, R1))
    bench.admit(2, HISTORY[:1500])
    bench.offer(2, HISTORY[:1500])
    for rank in (R0, R1):
        assert load_of(bench.begin(2, HISTORY[:1500], ranks=(rank,)))[FULL_COPY][0] == 0
    bench.verbs.publish("engine", (R0,), 2, upto_token=768, after={str(R0): POINT})
    bench.verbs.loaded("engine", 2, (R0,))
    assert [order.section.stop_token for order in bench.orders(R0, 2)] == [768]
    assert bench.orders(R1, 2) == []
    assert bench.room(2).load.ranks == {R0}


def test_an_abort_by_decode_keeps_what_the_engine_has_finished():
    tokens = HISTORY[:1500]
    bench = on_host(HISTORY[:1000])
    bench.admit(2, tokens)
    bench.offer(2, tokens)
    begun = bench.begin(2, tokens)
    load(bench, 2)
    bench.publish(2, tokens)
    bench.finish(2, tuple(one.tokens for one in begun.checkpoints))
    bench.abort(2)
    bench.closed(2)
    assert bench.admit(3, HISTORY[:2000]).computed_tokens == 1280


class DecodeBench(KeyedDecode):
    """A decode node whose prefixes have come to the host."""

    def on_host(self, room: int, tokens: int) -> None:
        self.whole(room, tokens)
        to_the_host(self, tokens)

    def on_device(self, tokens: int) -> int:
        """Pages of the prompt of so many tokens that a room would have to load nothing of."""
        found = self.keyed(10**5 + next(_copies), tokens)
        told = (found.prefix_tokens - found.host_tokens) // PAGE
        self.stop(found.room)
        self.drained(room=found.room)
        return told


@pytest.fixture
def decode():
    bench = DecodeBench(twins=32)
    yield bench
    check_cache(bench.prefixes)


def test_what_decode_has_loaded_is_shared_at_once_and_so_is_what_follows(decode):
    decode.on_host(1, 3 * PAGE)
    room = decode.arrived(2, 5 * PAGE)
    assert decode.on_device(5 * PAGE) == 0, "it cannot be reached before what is before it is loaded"
    own, _ = room.load.moves[FULL]
    assert own.tolist() == room.tables[FULL].ids[:3].tolist()
    assert decode.service.pages.own_tables(room)[FULL].first_page == 3, "no peer writes what is loaded"
    decode.claim(room)
    assert decode.on_device(5 * PAGE) == 0
    decode.verbs.loaded(room=2)
    assert decode.on_device(5 * PAGE) == 5
    sibling = decode.arrived(3, 6 * PAGE)
    assert sibling.tables[FULL].ids[:5].tolist() == room.tables[FULL].ids[:5].tolist()
    for again in (2, 3, 4):  # once more, of a room that loads nothing, and of one that nobody knows
        decode.verbs.loaded(room=again)
    decode.verbs.release(room=2)


def test_pages_are_shared_when_they_are_loaded_on_every_rank(decode):
    decode.ranks.layers[R1] = decode.ranks.layers[R0]
    decode.on_host(1, 3 * PAGE)
    room = decode.claimed(2, 4 * PAGE)
    decode.verbs.loaded("engine", 2, (R0,), bytes=10, seconds=0.5)
    decode.verbs.loaded("engine", 2, (R0,))
    assert room.load is not None
    assert decode.on_device(4 * PAGE) == 0
    decode.verbs.loaded("engine", 2, (R1,), bytes=20, seconds=0.25)
    assert (room.load, decode.on_device(4 * PAGE)) == (None, 4)
    [fact] = decode.events.of(CopyEnded)
    assert (fact.direction, fact.pages, fact.bytes, fact.busy_s) == ("load_back", 3, 30, 0.5)


@pytest.mark.parametrize("fails", [True, False])
def test_a_load_that_fails_is_told_and_an_engine_that_gives_up_for_another_reason_is_none(decode, fails):
    decode.on_host(1, 3 * PAGE)
    decode.claimed(2, 4 * PAGE)
    decode.verbs.abort("engine", 2, "the device is full", load_failed=fails)
    told = [(fact.direction, fact.pages, fact.code, fact.reason) for fact in decode.events.of(CopyEnded)]
    assert told == [("load_back", 3, "transport_failed", "the device is full")] * fails
