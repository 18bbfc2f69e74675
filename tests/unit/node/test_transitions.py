"""The loop that both sides share: an event, its actions, and what the facts amount to then, one after another."""

from __future__ import annotations

import inspect

import pytest

from kvbridge.core.errors import ConflictError
from kvbridge.core.ids import Role
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.node.driver import RoomDriver
from kvbridge.node.room import Room
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_facts import RoomFacts
from kvbridge.node.sender.room import SenderRoom, user_state
from kvbridge.telemetry.events import RoomEntered
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import FakeEngines, RecordedEvents


class Scripted:
    """Facts amount to what `script` says of a state; everything that is done is written down."""

    table = SENDER_TABLE
    ABORT, FAULT, OTHER_PROMPT = SenderEvent.ABORT, SenderEvent.FAULT, SenderEvent.FAULT

    def __init__(self) -> None:
        self.script = {SenderState.SENDING: SenderEvent.ALL_SENT, SenderState.ABORTING: SenderEvent.DRAINED}
        self.done: list[object] = []
        self.depths: list[int] = []

    def next_event(self, room: Room) -> SenderEvent | None:
        return self.script.get(room.state)

    def entered(self, room: Room) -> None:
        self.done.append(room.state)
        self.depths.append(len(inspect.stack(0)))

    def act(self, room: Room, action: SenderAction) -> None:
        self.done.append(action)

    def at_rest(self, room: Room) -> None:
        self.done.append("rest")


@pytest.fixture
def rules() -> Scripted:
    return Scripted()


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture
def driver(rules, events) -> RoomDriver[Room]:
    clock = ManualClock()
    rooms = RoomBook(Role.PREFILL, user_state, clock=clock, keep_s=1)
    return RoomDriver(rules, RoomFacts(rooms, FakeEngines(), events, {}, clock))


@pytest.fixture
def room() -> Room:
    return SenderRoom(
        room=1,
        generation=1,
        prompt_tokens=1,
        prefix_tokens=0,
        max_new_tokens=0,
        client="",
        state=SENDER_TABLE.start,
        created_s=0.0,
    )


def test_facts_lead_on_from_an_event_until_nothing_follows(driver, rules, events, room):
    driver.advance(room, SenderEvent.OFFER)
    opened = SENDER_TABLE.step(SenderState.ADMITTED, SenderEvent.OFFER)[1]
    sent = SENDER_TABLE.step(SenderState.SENDING, SenderEvent.ALL_SENT)[1]
    assert rules.done == [SenderState.SENDING, *opened, SenderState.COMPLETED, *sent, "rest"]
    assert len(set(rules.depths)) == 1, "one transition does not run inside another"
    assert [fact.state.value for fact in events.of(RoomEntered)] == ["offered", "completed"]


def test_an_event_that_is_not_possible_changes_nothing(driver, rules, room):
    with pytest.raises(ConflictError, match="'drained' is not possible in state 'admitted'"):
        driver.advance(room, SenderEvent.DRAINED)
    assert (room.state, rules.done) == (SenderState.ADMITTED, [])
