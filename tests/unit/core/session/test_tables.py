"""The transitions of a room, the meanings of messages, the progress of ranks. `unit/node/test_hearing.py` holds nodes to them."""

from itertools import product
from pathlib import Path

import pytest

import kvbridge.core.session
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.plan.operations import Section
from kvbridge.core.session import decode, prefill
from kvbridge.core.session.decode import DecodeAction, DecodeEvent, DecodeMessage, DecodeState
from kvbridge.core.session.prefill import PrefillAction, PrefillEvent, PrefillMessage, PrefillState, RankProgress
from kvbridge.core.session.tables import Meaning
from tests.helpers.session_tables import tables_markdown

SIDES = pytest.mark.parametrize(
    ("table", "events", "actions"),
    [
        pytest.param(prefill.PREFILL_TABLE, PrefillEvent, PrefillAction, id="sender"),
        pytest.param(decode.DECODE_TABLE, DecodeEvent, DecodeAction, id="receiver"),
    ],
)


@SIDES
def test_a_table_is_whole_and_uses_every_word(table, events, actions):
    follows = {state: {target for target, _ in row.values()} for state, row in table.rows.items()}

    def reached(state):
        seen, queue = {state}, [state]
        while queue:
            fresh = follows[queue.pop()] - seen
            seen |= fresh
            queue += fresh
        return seen

    assert follows.keys() == reached(table.start) == set(type(table.start))
    assert all(reached(state) & table.final for state in follows), "a state that never ends"
    assert all(follows[state] <= {state} for state in table.final), "something leads out of a final state"
    listed = [(event, acts) for row in table.rows.values() for event, (_, acts) in row.items()]
    assert {event for event, _ in listed} == set(events)
    assert {action for _, acts in listed for action in acts} == set(actions)


@SIDES
def test_abort_and_fault_are_possible_everywhere_and_disturb_no_ended_room(table, events, actions):
    for state in table.rows:
        for event in (events.ABORT, events.FAULT):
            target, acts = table.step(state, event)
            if state in table.final:
                assert target is state
                assert set(acts) <= {PrefillAction.TELL_DRAINED}


def test_pages_of_an_offered_room_come_back_by_proof_only():
    """Nothing but a proof leads from a state in which pages may be written or read to one in which they are given back."""
    in_use = {DecodeState.OFFERED, DecodeState.ABORTING, DecodeState.FAILING}
    read = {DecodeState.CLAIMED, DecodeState.ABORTING_CLAIMED, DecodeState.FAILING_CLAIMED}
    for state, row in decode.DECODE_TABLE.rows.items():
        for event, (target, actions) in row.items():
            freed = DecodeAction.FREE in actions
            assert freed == (target in decode.DECODE_TABLE.final and state not in decode.DECODE_TABLE.final)
            if freed and state in in_use:
                assert event is DecodeEvent.DRAINED
            if freed and state in read:
                assert event is DecodeEvent.RELEASE
    for state, row in prefill.PREFILL_TABLE.rows.items():
        for event, (target, actions) in row.items():
            freed = PrefillAction.FREE_SOURCE in actions
            assert freed == (target in prefill.PREFILL_TABLE.final and state not in prefill.PREFILL_TABLE.final)
            if freed and state not in {PrefillState.ADMITTED, PrefillState.AWAITED}:  # nobody knows where to send it
                assert event in {PrefillEvent.DRAINED, PrefillEvent.ALL_SENT}


def test_the_printed_tables_are_those_of_the_code():
    printed = Path(kvbridge.core.session.__path__[0]) / "TABLES.md"
    assert printed.read_text() == tables_markdown(), "print them again: python -m tests.helpers.session_tables"


@pytest.mark.parametrize(("hearing", "side"), [(prefill.PREFILL_HEARS, prefill), (decode.DECODE_HEARS, decode)])
def test_every_state_has_a_row_and_every_word_is_used(hearing, side):
    role = side.__name__.rpartition(".")[2].capitalize()
    states, speakers, messages = (getattr(side, f"{role}{kind}") for kind in ("State", "Speaker", "Message"))
    assert set(hearing.rows) == set(states)
    rows = [*hearing.rows.values(), hearing.unknown]
    assert {speaker for row in rows for speaker in row} == set(speakers)
    assert {message for row in rows for said in row.values() for message in said} == set(messages)
    for state, speaker, message in product([*states, None], [*speakers, None], messages):
        listed = (hearing.unknown if state is None else hearing.rows[state]).get(speaker, {})
        assert hearing.meaning(state, speaker, message) is listed.get(message)


def test_words_that_give_pages_back_are_listed_only_where_pages_may_be_touched():
    """Done and Drained count as proof from the offer on, and RoomClosed once a rank was told to close."""
    written = {DecodeState.OFFERED, DecodeState.ABORTING, DecodeState.FAILING}
    for state, row in decode.DECODE_HEARS.rows.items():
        for said in row.values():
            for message in {DecodeMessage.DONE, DecodeMessage.DRAINED} & said.keys():
                assert state in written or said[message] is Meaning.LATE
    for state, row in prefill.PREFILL_HEARS.rows.items():
        for said in row.values():
            if said.get(PrefillMessage.ROOM_CLOSED, Meaning.LATE) is not Meaning.LATE:
                assert state in {PrefillState.ABORTING, PrefillState.FAILING}


def section(start, stop, layers=None, prefix=0):
    return Section(prompt_tokens=100, prefix_tokens=prefix, start_token=start, stop_token=stop, layers=layers)


def test_what_decode_holds_waits_for_what_follows():
    progress = RankProgress((0, 1), prompt_tokens=100, computed_tokens=40)
    assert progress.next_sections(40) == []
    progress.publish(60, (0, 1))
    assert progress.next_sections(40) == [section(0, 60, prefix=40)]
    whole = RankProgress((0, 1), prompt_tokens=100)
    whole.publish(99, (0, 1))
    assert whole.next_sections(100) == []
    whole.publish(100, (0, 1))
    assert whole.next_sections(100) == [section(0, 100, prefix=100)], "windows and states are always sent"


def test_layers_that_are_equally_far_go_together():
    progress = RankProgress((0, 1, 2), prompt_tokens=100)
    progress.publish(60, (0, 2))
    assert progress.published_tokens == 0
    assert progress.next_sections(0) == [section(0, 60, (0, 2))]
    progress.publish(60, (1,))
    progress.publish(100, (2,))
    assert progress.next_sections(0) == [section(0, 60, (1,)), section(60, 100, (2,))]
    assert progress.published_tokens == 60


@pytest.mark.parametrize(("upto", "layers", "invalid"), [(101, None, True), (10, None, False), (10, (0, 1), False)])
def test_a_wrong_publication_is_refused(upto, layers, invalid):
    progress = RankProgress((0, 1), prompt_tokens=100)
    progress.publish(20, (1,))
    with pytest.raises(InvalidInputError if invalid else ConflictError):
        progress.check(upto, layers)


def test_a_rank_without_layers_has_nothing_to_wait_for():
    progress = RankProgress((), prompt_tokens=100)
    assert progress.complete
    assert progress.next_sections(0) == []
