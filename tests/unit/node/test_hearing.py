"""Every message of a peer or a rank worker, in every state of a room: it does what the literal lists, or it changes nothing."""

import pickle
from collections.abc import Callable
from functools import partial

import pytest

from kvbridge.core.errors import BridgeError
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.decode import DECODE_HEARS, DECODE_TABLE, DecodeState
from kvbridge.core.session.prefill import PREFILL_HEARS, PREFILL_TABLE, PrefillState
from kvbridge.core.session.tables import Meaning
from kvbridge.core.wire import messages
from kvbridge.core.wire.worker_messages import Digested, Rerouted, RoomClosed, Sent, Verified
from kvbridge.node.decode.room import speaker_of as decode_speaker
from kvbridge.node.prefill.room import ALIVE, speaker_of as prefill_speaker
from kvbridge.pool.accounts.book import Owner
from tests.helpers.accounts import check_book
from tests.helpers.node_bench import DecodeBench, PrefillBench
from tests.helpers.rooms import ADDRESS, DECODE, OTHER_ADDRESS, PREFILL, R0, R1, TOKENS, full_amounts, pages_table

SECOND = "bbbb000000000001"
STRANGER = "eeee000000000001"
OWNER = Owner(1, 1)
HALVES = {kind: Amount(lane_rows=amount.lane_rows // 2, bytes=1) for kind, amount in full_amounts(TOKENS).items()}
SAID = {"room": 1, "generation": 1}


def done(rank=R0) -> messages.Done:
    return messages.Done(**SAID, writer=rank, amounts=HALVES, phases_s={})


def drained(*, in_transit: bool = False) -> messages.Drained:
    return messages.Drained(**SAID, in_transit=in_transit)


def failed() -> messages.Failed:
    return messages.Failed(**SAID, code="transport_failed", message="cable")


HOW_THEY_COME: dict[DecodeState, tuple[str, ...]] = {
    DecodeState.VERIFYING: ("arrive",),
    DecodeState.COMMITTED: ("arrive",),
    DecodeState.CLAIMED: ("arrive", "claim"),
    DecodeState.ABORTING_CLAIMED: ("arrive", "claim", "stop"),
    DecodeState.FAILING_CLAIMED: ("arrive", "claim", "fail"),
    DecodeState.COMPLETED: ("arrive", "claim", "release"),
    DecodeState.ABORTING: ("stop",),
    DecodeState.FAILING: ("fail",),
    DecodeState.ABORTED: ("stop", "drain"),
    DecodeState.FAILED: ("fail", "drain"),
}
ARRIVED = {state for state, way in HOW_THEY_COME.items() if way[0] == "arrive"}


def decode_in(state: DecodeState | None, before: str = "") -> DecodeBench:
    """A bench whose room 1 (None: no room) is written by PREFILL (rank 0) and SECOND (rank 1), and stands in a state.

    `before`: what PREFILL has said in time: nothing, "done", or "done" and "drained".
    """
    adopted = state in {DecodeState.AWAITING_PAGES, DecodeState.INTENDED}
    digest = DigestKind.CRC32C if state is DecodeState.VERIFYING else DigestKind.NONE
    bench = DecodeBench(adopted=adopted, digest=digest)
    if state not in {DecodeState.AWAITING_PAGES, DecodeState.RESERVED}:
        bench.nodes.know(tp_size=2)
        bench.nodes.know(OTHER_ADDRESS, SECOND, (R1,), tp_size=2)
    if state is None:
        return bench
    bench.admit(prefill=(ADDRESS, OTHER_ADDRESS))
    room, hear = bench.room(), bench.hear
    steps = {
        "done": lambda: hear(done()),
        "drained": lambda: (hear(done()), hear(drained())),
        "arrive": lambda: (hear(done()), hear(done(R1), SECOND)),
        "claim": bench.verbs.claim,
        "release": bench.verbs.release,
        "stop": bench.stop,
        "fail": lambda: bench.service.fail(room, "x", "y"),
        "drain": lambda: (hear(drained()), hear(drained(), SECOND)),
    }
    for step in (*[before][: bool(before)], *HOW_THEY_COME.get(state, ())):
        steps[step]()
    assert room.state is state
    bench.events.facts.clear()
    return bench


DECODE_SAID: list[tuple[str, messages.RoomMessage]] = [
    (who, message)
    for who, rank in ((PREFILL, R0), (PREFILL, R1), (SECOND, R1), (STRANGER, R0))
    for message in (
        messages.Digests(**SAID, writer=rank, part=0, digests=()),
        done(rank),
        messages.PathLost(**SAID, writer=rank, transport="mooncake", epoch=0),
        failed(),
        drained(),
        drained(in_transit=True),
    )
] + [
    ("", Digested(**SAID, rank=R0, digests=())),
    ("", Verified(**SAID, rank=R0)),
    ("", Verified(**SAID, rank=R0, error_code="unsupported", error="no kernel")),
]


def seen(bench: DecodeBench | PrefillBench, owner: Owner) -> bytes:
    """All that a message about a room could change, but what is counted."""
    room = bench.service.book.find(*owner)
    told = bench.nodes.messages if isinstance(bench, DecodeBench) else bench.peers.messages
    others = bench.ranks.messages if isinstance(bench, DecodeBench) else bench.workers.messages
    asked = (bench.fence.asked, bench.fence.paths) if isinstance(bench, DecodeBench) else ()
    facts = {} if room is None else {name: fact for name, fact in vars(room).items() if name != "note_limit"}
    return pickle.dumps((facts, bench.book.state(owner), told, others, bench.engines.events, asked))


def histories(state: DecodeState | None) -> list[str]:
    return ["", "done", "drained"] if state in {*ARRIVED, DecodeState.OFFERED, DecodeState.ABORTING} else [""]


def targets(table, state) -> set:
    """States that events lead to, one after another, from a state."""
    found, queue = {state}, [state]
    while queue:
        for target, _ in table.rows[queue.pop()].values():
            if target not in found:
                found.add(target)
                queue.append(target)
    return found


def does_what_is_listed(bench, table, meaning, hear: Callable[[], object], what: str) -> None:
    """A message with a meaning leads to a state of the table; one that is late or has none changes nothing."""
    room = bench.service.book.find(*OWNER)
    state = room and room.state
    looked, refused = seen(bench, OWNER), bench.events.refusals.total()
    hear()
    if meaning in {None, Meaning.LATE}:
        assert seen(bench, OWNER) == looked, f"{what} has changed a room that is {state}"
        assert bench.events.refusals.total() - refused == (meaning is None)
    elif room is not None:
        assert room.state in targets(table, state)
        assert bench.events.refusals.total() - refused == (meaning is Meaning.TURN_AWAY)
    else:
        assert table is PREFILL_TABLE, "a decode node takes nothing about a room that it does not have"
    check_book(bench.book)


def rooms_in(states, histories_of) -> list[object]:
    return [
        pytest.param(state, before, id=f"{state or 'unknown'}-{before or 'nothing'}")
        for state in states
        for before in histories_of(state)
    ]


@pytest.mark.parametrize(("state", "before"), rooms_in([*DecodeState, None], histories))
def test_decode_takes_what_is_listed_and_nothing_else_changes_a_room(state, before):
    for who, message in DECODE_SAID:
        bench = decode_in(state, before)
        room = bench.service.book.find(*OWNER)
        speaker = decode_speaker(room, who, message)
        meaning = DECODE_HEARS.meaning(state, speaker, message.type)
        hear = partial(bench.hear, message, who) if who else partial(bench.service.hear_rank, message)
        does_what_is_listed(bench, DECODE_TABLE, meaning, hear, f"{message!r} of {speaker}")


def test_no_word_of_a_writer_before_the_offer_counts_after_it():
    """A rank that reported before anybody knew a page has sent nothing: its bytes are waited for."""
    bench = decode_in(DecodeState.INTENDED)
    for message in (
        done(),
        messages.PathLost(**SAID, writer=R0, transport="mooncake", epoch=0),
        drained(in_transit=True),
    ):
        bench.hear(message)
    bench.verbs.provide(1, pages_table(4, 5))
    assert bench.room().writers[PREFILL].missing == {R0}
    bench.hear(done(R1), SECOND)
    assert bench.state() is DecodeState.OFFERED
    assert "committed" not in bench.engines.kinds
    assert bench.events.refusals == {"unexpected_done": 1, "unexpected_path_lost": 1, "unexpected_drained": 1}


HOW_THEY_GO: dict[PrefillState, tuple[str, ...]] = {
    PrefillState.AWAITED: ("intend",),
    PrefillState.SENDING: ("offer",),
    PrefillState.ABORTING: ("offer", "stop"),
    PrefillState.FAILING: ("offer", "fail"),
    PrefillState.COMPLETED: ("offer", "finish"),
    PrefillState.ABORTED: ("offer", "stop", "close"),
    PrefillState.FAILED: ("offer", "fail", "close"),
}
ENDED_EARLY = {PrefillState.ABORTED: ("intend", "stop"), PrefillState.FAILED: ("intend", "fail")}
"""Rooms that a decode node has said it would come for, and did not."""


def offer() -> messages.Offer:
    return messages.Offer(**SAID, prompt_tokens=TOKENS, tables=messages.to_wire(pages_table(7, 8)))


def prefill_in(state: PrefillState | None, before: str = "") -> PrefillBench:
    """A bench whose room 1 (None: no room) stands in a state; DECODE has intended or offered it where it could.

    `before`: "closed": rank 0 has let it go already; "intended": it ended before the offer came.
    """
    bench = PrefillBench(ranks=(R0, R1))
    if state is None:
        return bench
    bench.admit()
    room, hear = bench.room(), bench.service.hear_rank

    def offered() -> None:
        bench.hear(offer())
        bench.verbs.begin()
        bench.verbs.publish()

    def finished() -> None:
        bench.verbs.finish()
        for order, rank in ((1, R0), (2, R1)):
            hear(Sent(**SAID, rank=rank, order=order))

    steps = {
        "intend": lambda: bench.hear(messages.Intend(**SAID, prompt_tokens=TOKENS)),
        "offer": offered,
        "finish": finished,
        "stop": bench.stop,
        "fail": lambda: bench.service.fail(room, "x", "y"),
        "close": bench.closed,
        "closed": lambda: hear(RoomClosed(**SAID, rank=R0, quiet=True)),
    }
    way = ENDED_EARLY[state] if before == "intended" else HOW_THEY_GO.get(state, ())
    for step in (*way, *(["closed"] if before == "closed" else [])):
        steps[step]()
    assert room.state is state
    bench.events.facts.clear()
    return bench


PREFILL_SAID: list[tuple[str, messages.RoomMessage]] = [
    (who, message)
    for who in (DECODE, STRANGER)
    for message in (
        messages.Intend(**SAID, prompt_tokens=TOKENS),
        offer(),
        messages.Abort(**SAID, code="aborted", message="enough"),
        failed(),
    )
] + [
    ("", message)
    for rank in (R0, R1)
    for message in (
        Digested(**SAID, rank=rank, order=1, digests=()),
        Sent(**SAID, rank=rank, order=1),
        Sent(**SAID, rank=rank, order=2, quiet=False, in_transit=True, error="cable"),
        Sent(**SAID, rank=rank, order=9, quiet=False, in_transit=True, error="never given"),
        Rerouted(**SAID, rank=rank, lost="local", over="nixl", epoch=2, in_transit=True),
        RoomClosed(**SAID, rank=rank, quiet=True),
        RoomClosed(**SAID, rank=rank, quiet=False, reason="stuck"),
    )
]


def prefill_histories(state: PrefillState | None) -> list[str]:
    stopping = ["", "closed"] if state in {PrefillState.ABORTING, PrefillState.FAILING} else [""]
    return ["", "intended"] if state in ENDED_EARLY else stopping


@pytest.mark.parametrize(("state", "before"), rooms_in([*PrefillState, None], prefill_histories))
def test_prefill_takes_what_is_listed_and_nothing_else_changes_a_room(state, before):
    for who, message in PREFILL_SAID:
        bench = prefill_in(state, before)
        room = bench.service.book.find(*OWNER)
        speaker = prefill_speaker(room, who, message)
        meaning = PREFILL_HEARS.meaning(state, speaker, message.type)
        hear = partial(bench.hear, message, who) if who else partial(bench.service.hear_rank, message)
        does_what_is_listed(bench, PREFILL_TABLE, meaning, hear, f"{message!r} of {speaker}")
        if meaning is Meaning.TURN_AWAY:
            assert room.state is state
            proof = (
                [] if isinstance(message, messages.Intend) else [messages.Drained]
            )  # an offer may follow an intent, and be taken
            assert [type(said) for said in bench.told(object, who)][-1 - len(proof) :] == [messages.Failed, *proof]


def engine_calls(bench: DecodeBench | PrefillBench) -> dict[str, Callable[[], object]]:
    """Every call of an engine, by one that uses the room if any does, and by another."""
    verbs, calls = bench.verbs, {}
    for who in ("engine", "other"):
        if isinstance(bench, DecodeBench):
            of_role = {
                "provide": partial(verbs.provide, 1, pages_table(4, 5)),
                "claim": partial(verbs.claim, who),
                "loaded": partial(verbs.loaded, who),
                "extend": partial(verbs.extend, who, 1, TOKENS),
                "release": partial(verbs.release, who),
            }
        else:
            of_role = {
                "begin": partial(verbs.begin, who),
                "publish": partial(verbs.publish, who),
                "loaded": partial(verbs.loaded, who),
                "finish": partial(verbs.finish, who),
                "release": partial(verbs.release, who, generation=1),
            }
        calls |= {f"{name} of {who}": call for name, call in of_role.items()}
    return calls


@pytest.mark.parametrize("state", [*DecodeState, *PrefillState], ids=lambda state: f"{type(state).__name__}-{state}")
def test_a_call_of_an_engine_that_is_refused_changes_nothing(state):
    make = decode_in if isinstance(state, DecodeState) else prefill_in
    for name in engine_calls(make(state)):
        bench = make(state)
        looked = seen(bench, OWNER)
        try:
            engine_calls(bench)[name]()
        except BridgeError:
            room = bench.room()
            lets_go = name == "finish of engine" and room.state not in ALIVE  # all the same, and it says so
            assert seen(bench, OWNER) == looked or lets_go, f"{name} was refused and has changed a room that is {state}"
        check_book(bench.book)
