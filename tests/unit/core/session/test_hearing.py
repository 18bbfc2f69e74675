"""What a room takes from whom, by its state: the literals that `tests/unit/node/test_hearing.py` holds nodes to."""

from __future__ import annotations

from itertools import product

import pytest

from kvbridge.core.session.decode import DECODE_HEARS, DecodeMessage, DecodeSpeaker, DecodeState
from kvbridge.core.session.prefill import PREFILL_HEARS, PrefillMessage, PrefillSpeaker, PrefillState
from kvbridge.core.session.tables import Meaning


@pytest.mark.parametrize(
    ("hearing", "states", "speakers", "messages"),
    [
        pytest.param(PREFILL_HEARS, PrefillState, PrefillSpeaker, PrefillMessage, id="sender"),
        pytest.param(DECODE_HEARS, DecodeState, DecodeSpeaker, DecodeMessage, id="receiver"),
    ],
)
def test_every_state_has_a_row_and_every_word_is_used(hearing, states, speakers, messages):
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
    for state, row in DECODE_HEARS.rows.items():
        for said in row.values():
            for message in {DecodeMessage.DONE, DecodeMessage.DRAINED} & said.keys():
                assert state in written or said[message] is Meaning.LATE
    for state, row in PREFILL_HEARS.rows.items():
        for said in row.values():
            if said.get(PrefillMessage.ROOM_CLOSED, Meaning.LATE) is not Meaning.LATE:
                assert state in {PrefillState.ABORTING, PrefillState.FAILING}
