"""Paired order, a rule at a time: prefill's publications while it computes, and decode's reaction to a new generation."""

from collections import Counter

import pytest

from kvbridge.core.errors import InvalidInputError, NotReadyError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.tables import WITHDRAWN
from kvbridge.core.wire.engine_messages import AbortRoom, Fetch, Finish, Hold, Provide, Publish, RoomEvent
from kvbridge.engine.kit.transfers import ServedRole
from kvbridge.engine.vllm.requests import Request, Source, params_of
from tests.helpers.vllm_links import ADDRESS, attach, rooms_at

BLOCK = 16
TOKENS = 3 * BLOCK + 5
BLOCKS = (10, 11, 12, 13)
PAIRED = {"do_remote_decode": True, "kvbridge": {"room": "7"}}


class Node:
    """A link to a node that takes every call, unless it does not read; and references to blocks, counted."""

    lost = ""

    def __init__(self) -> None:
        self.said: list[tuple] = []
        self.news: list[RoomEvent] = []
        self.deaf = False
        self.pins: Counter[int] = Counter()

    def number(self) -> int:
        return 1

    def events(self, timeout_s: float) -> list[RoomEvent]:
        news, self.news = self.news, []
        return news

    def post(self, call) -> None:
        if self.deaf:
            raise NotReadyError("it does not read")
        facts = {
            Hold: lambda: (call.generation, ids(call), call.published_tokens),
            Publish: lambda: (call.upto_token, ids(call)),
            Finish: lambda: (),
            Fetch: lambda: (call.generation, ids(call), call.prefix_tokens),
            Provide: lambda: (ids(call),),
            AbortRoom: lambda: (call.again,),
        }
        self.said.append((call.type.removesuffix("_room"), call.room, *facts[type(call)]()))

    def pin(self, blocks) -> None:
        self.pins.update(blocks)

    def unpin(self, blocks) -> None:
        self.pins.subtract(blocks)
        assert min(self.pins.values()) >= 0

    def take(self) -> list[tuple]:
        said, self.said = self.said, []
        return said

    @property
    def pinned(self) -> set[int]:
        return set(+self.pins)


def ids(call) -> tuple[int, list[int]] | None:
    table = tables_from_wire(call.tables or ()).get(IndexSpace.FULL)
    return None if table is None else (table.first_page, table.ids.tolist())


def event(kind="failed", *, room=7, generation=1, code="") -> RoomEvent:
    return RoomEvent(room=room, generation=generation, kind=kind, code=code)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def side(node):
    side = rooms_at(Role.PREFILL, node, block_tokens=BLOCK, rooms=[99])
    side.pins = node
    return side


def hear(side, node, *events) -> None:
    node.news += events
    side.look()


def request(params=None, *, name="p") -> Request:
    return Request(name, TOKENS, b"digest", PAIRED if params is None else params)


def computing(side, node, *, blocks=0) -> None:
    """A request has come and was scheduled for the first time, and then for a chunk behind so many blocks."""
    side.arrived(request())
    side.computed("p", 0, 0, (BLOCKS[:1],))
    if blocks:
        side.computed("p", blocks * BLOCK, 0, (BLOCKS,))
    node.take()


def test_a_room_is_held_from_the_arrival_on_and_whole_blocks_of_earlier_steps_are_published_and_pinned(side, node):
    side.arrived(request())
    assert node.take() == [("hold", 7, 1, None, 0)]
    assert side.computing == ("p",)
    side.computed("p", 0, 0, (BLOCKS[:1],))
    assert not node.pinned
    for tokens, said in (
        (2 * BLOCK + 3, [(2 * BLOCK, (0, [10, 11]))]),
        (3 * BLOCK, [(3 * BLOCK, (2, [12]))]),
        (3 * BLOCK, []),
    ):
        side.computed("p", tokens, 0, (BLOCKS,))
        assert node.take() == [("publish", 7, *one) for one in said]
    assert node.pinned == {10, 11, 12}
    held, answer = side.finished(request(), ((*BLOCKS, 14),), well=True)
    assert node.take() == [("publish", 7, 4 * BLOCK, (3, [13])), ("finish", 7)]
    assert held
    assert answer == params_of(Source(room=7, prefill=(ADDRESS,)))
    assert not node.pinned, "vLLM keeps the blocks"
    [told] = side.step().begun
    assert (told.request, told.room, told.generation, told.node) == ("p", 7, 1, "n1")
    hear(side, node, event("completed"))
    assert not side._of


def test_without_references_to_blocks_nothing_is_published_before_it_finishes(node):
    side = rooms_at(Role.PREFILL, node, block_tokens=BLOCK)
    computing(side, node, blocks=2)
    side.finished(request(), (BLOCKS,), well=True)
    assert node.take() == [("publish", 7, 4 * BLOCK, (0, [10, 11, 12, 13])), ("finish", 7)]


@pytest.mark.parametrize("room", ["abc", "-1", str(1 << 60), "7"])
def test_a_room_that_cannot_be_read_or_that_another_request_has_makes_it_plain(side, node, room):
    computing(side, node)
    told = request(PAIRED | {"kvbridge": {"room": room}}, name="q")
    with pytest.raises(
        InvalidInputError, match="another request has room 7" if room == "7" else r"kvbridge\.room is wrong"
    ):
        side.arrived(told)
    assert side.computing == ("p",)
    held, answer = side.finished(told, (BLOCKS,), well=True)
    assert node.take() == [("hold", 99, 1, (0, [10, 11, 12, 13]), 4 * BLOCK)]
    assert held
    assert answer["kvbridge"]["room"] == "99"


def test_what_was_published_stays_pinned_when_a_request_is_aborted_between_its_preemption_and_the_next_step(side, node):
    """vLLM has freed its blocks by then, and reports it only at the next step."""
    computing(side, node, blocks=2)
    assert side.finished(request(), ((),), well=False) == (False, None)
    assert node.take() == [("abort", 7, False)]
    assert node.pinned == {10, 11}
    assert not side.idle
    hear(side, node, event("aborted"))
    assert not node.pinned
    side.step()
    assert side.idle


def test_preemption_before_anything_is_published_changes_nothing(side, node):
    computing(side, node)
    side.preempted({"p", "another"})
    assert node.take() == []
    assert not side.blocks_return({"p", "another"})


def test_what_was_over_before_it_could_be_withdrawn_does_not_begin_anew(side, node):
    """Decode had given it up, so it does not fetch the next generation."""
    computing(side, node, blocks=2)
    side.preempted({"p"})
    node.take()
    hear(side, node, event("aborted", code="aborted"))
    assert node.take() == [("abort", 7, False)]
    assert not node.pinned
    assert side.finished(request(), (BLOCKS,), well=True)[0] is False
    assert not side._of


def test_the_next_generation_waits_for_the_word_that_the_one_before_is_over(side, node):
    computing(side, node, blocks=2)
    node.deaf = True
    side.preempted({"p"})
    node.deaf = False
    side.computed("p", BLOCK, 0, ((20, 21),))
    assert node.take() == []
    side.look()
    assert node.take() == [("abort", 7, True), ("hold", 7, 2, None, 0)]


def test_an_aborted_request_keeps_what_is_being_sent(side, node):
    computing(side, node, blocks=2)
    assert side.finished(request(), (BLOCKS[:2],), well=False) == (True, None)
    assert node.take() == [("abort", 7, False)]
    assert not node.pinned
    worker = ServedRole(Role.DECODE, lambda: None)
    worker.start(side.step())
    assert worker.results()[0] == set()
    worker.heard([event("aborted")])
    assert worker.results()[0] == {"p"}


def test_when_decode_gives_up_prefill_goes_on_without_it(side, node):
    computing(side, node, blocks=2)
    hear(side, node, event("aborted"))
    assert not node.pinned
    side.computed("p", 3 * BLOCK, 0, (BLOCKS,))
    held, answer = side.finished(request(), (BLOCKS,), well=True)
    assert node.take() == []
    assert not held
    assert answer["kvbridge"]["prefill"] == [ADDRESS.model_dump()]


def test_a_room_that_the_node_would_not_hold_is_known_to_nobody(side, node):
    computing(side, node, blocks=2)
    side.finished(request(), (BLOCKS,), well=True)
    worker = ServedRole(Role.DECODE, lambda: None)
    worker.start(side.step())
    hear(side, node, event("refused", generation=1), event("refused", generation=0))
    worker.start(side.step())
    assert worker.results()[0] == {"p"}


def test_a_publication_that_is_refused_ends_the_room_but_not_what_is_being_sent(side, node):
    computing(side, node, blocks=2)
    hear(side, node, event("refused", generation=0))
    assert node.take() == [("abort", 7, False)]
    assert node.pinned == {10, 11}
    assert side.step().refused == ()
    hear(side, node, event("aborted"))
    assert not node.pinned


def test_blocks_stay_pinned_until_no_rank_reads_for_a_node_that_has_ended(node):
    side = rooms_at(Role.PREFILL, node, block_tokens=BLOCK, ranks=2)
    side.pins = node
    computing(side, node, blocks=2)
    attach(side.attachment, node, "n2")
    side.look()
    side.closed(0, ["n1"])
    assert node.pinned == {10, 11}
    side.closed(1, ["n1"])
    assert not node.pinned
    assert side.finished(request(), (BLOCKS,), well=True)[0] is False


def test_what_a_deaf_node_is_not_told_it_is_told_later(side, node):
    node.deaf = True
    side.arrived(request())
    side.computed("p", 0, 0, (BLOCKS,))
    node.deaf = False
    side.look()
    assert node.take() == [("hold", 7, 1, None, 0)]
    node.deaf = True
    assert side.finished(request(), (BLOCKS,), well=True)[0] is True
    node.deaf = False
    side.look()
    assert node.take() == [("publish", 7, 4 * BLOCK, (0, [10, 11, 12, 13])), ("finish", 7)]


@pytest.fixture
def decode(node):
    return rooms_at(Role.DECODE, node, block_tokens=BLOCK)


@pytest.fixture
def started(decode, node) -> Request:
    """A load behind one block that decode has."""
    told = request(params_of(Source(room=7, prefill=(ADDRESS,))), name="d")
    decode.arrived(told)
    decode.allocated(told, (BLOCKS,), TOKENS - BLOCK)
    assert node.take() == [("fetch", 7, 1, None, 0), ("provide", 7, (1, [11, 12, 13]))]
    return told


def loading(decode) -> ServedRole:
    worker = ServedRole(Role.DECODE, lambda: None)
    worker.start(decode.step())
    return worker


def test_events_may_be_ahead_of_the_step_that_names_the_load(decode, node, started):
    worker = ServedRole(Role.DECODE, lambda: None)
    worker.heard([event(code=WITHDRAWN), event("committed", generation=2)])
    worker.start(decode.step())
    assert worker.results()[1] == {"d"}


@pytest.mark.parametrize("abort_first", [True, False])
def test_a_load_whose_request_was_aborted_is_reported_all_the_same(decode, node, started, abort_first):
    worker = loading(decode)
    steps = [lambda: decode.finished("d"), lambda: hear(decode, node, event(code=WITHDRAWN))]
    for step in steps if abort_first else steps[::-1]:
        step()
    worker.heard([event(code=WITHDRAWN)])
    said = [("abort", 7, False)] if abort_first else [("fetch", 7, 2, (1, [11, 12, 13]), BLOCK), ("abort", 7, False)]
    assert node.take() == said
    if not abort_first:
        worker.heard([event("aborted", generation=2)])
    worker.start(decode.step())
    assert worker.results()[1] == {"d"}
    decode.reported({"d"})
    assert "d" not in decode._of


def test_that_pages_came_too_late_for_a_withdrawn_room_means_nothing(decode, node, started):
    hear(decode, node, event(code=WITHDRAWN), event("refused", generation=0))
    assert node.take() == [("fetch", 7, 2, (1, [11, 12, 13]), BLOCK)]
    assert decode.step().refused == ()
    hear(decode, node, event("refused", generation=2))
    assert [room for room, _ in decode.step().refused] == [7]


def test_a_node_that_does_not_read_comes_again_when_it_reads(decode, node, started):
    worker = loading(decode)
    node.deaf = True
    worker.heard([event(code=WITHDRAWN)])
    hear(decode, node, event(code=WITHDRAWN))
    node.deaf = False
    worker.start(decode.step())
    decode.look()
    assert node.take() == [("fetch", 7, 2, (1, [11, 12, 13]), BLOCK)]
    assert worker.results()[1] == set()
    worker.heard([event("committed", generation=2)])
    assert worker.results()[1] == {"d"}


def test_a_load_of_a_node_that_has_ended_is_reported_when_no_rank_moves_a_byte_for_it(decode, node, started):
    worker = loading(decode)
    attach(decode.attachment, node, "n2")
    decode.look()
    worker.start(decode.step())
    assert worker.results()[1] == set()
    decode.closed(0, ["n1"])
    worker.start(decode.step())
    assert worker.results() == (set(), {"d"}, {"d"})
