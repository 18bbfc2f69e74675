"""The loop that both sides share: an event, its actions, and what the facts amount to then, one after another."""

from __future__ import annotations

import inspect

import pytest

from kvbridge.core.errors import ConflictError
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.node.driver import RoomDriver
from kvbridge.node.room import Quarantine, Room
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_facts import RoomFacts
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.node.sender.room import SenderRoom, user_state
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.events import RoomEntered, RoomQuarantined
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import GEOMETRY, SENDER_LIMITS, FakeEngines, RecordedEvents


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


def test_without_an_event_only_the_facts_are_looked_at(driver, rules, room):
    driver.advance(room)
    assert (room.state, rules.done) == (SenderState.ADMITTED, ["rest"])


def test_the_first_cause_is_kept_and_told(driver, rules, events, room):
    rules.script = {}
    driver.advance(room, SenderEvent.OFFER)
    driver.fail(room, "timeout", "too late")
    driver.stop(room, "enough")
    assert (room.state, room.reason_code, room.reason) == (SenderState.FAILING, "timeout", "too late")
    last = events.of(RoomEntered)[-1]
    assert (last.room, last.generation, last.code, last.reason) == (1, 1, "timeout", "too late")


def test_an_event_that_is_not_possible_changes_nothing(driver, rules, room):
    with pytest.raises(ConflictError, match="'drained' is not possible in state 'admitted'"):
        driver.advance(room, SenderEvent.DRAINED)
    assert (room.state, rules.done) == (SenderState.ADMITTED, [])


def test_a_quarantine_is_a_fact_once(events, room):
    book = PageBook({IndexSpace.FULL: 4})
    pages = RoomPages(book, RoomSettings(geometry=GEOMETRY, limits=SENDER_LIMITS), events)
    book.reserve(room.owner, {IndexSpace.FULL: 2}, state=PageState.HELD)
    for _ in range(2):
        pages.quarantine(room, Quarantine.NOT_QUIET, "rank pp0.tp0: stuck")
    [fact] = events.of(RoomQuarantined)
    assert (fact.room, fact.cause, fact.reason) == (1, "transport_not_quiet", "rank pp0.tp0: stuck")
    assert book.state(room.owner) is PageState.QUARANTINED
