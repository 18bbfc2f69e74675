"""The loop that both sides share: an event, its actions, and what the facts amount to then, one after another."""

from __future__ import annotations

import inspect
from typing import ClassVar

import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import ConflictError
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.node.room import Quarantine, Room
from kvbridge.node.rooms import RoomPorts, Rooms, RoomSettings
from kvbridge.node.sender.room import SenderRoom, user_state
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.events import RoomEntered, RoomQuarantined
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import GEOMETRY, SENDER_LIMITS, FakeEngines, FakeWorkers, RecordedEvents


class Scripted(Rooms[Room]):
    """Facts amount to what `script` says of a state; everything that is done is written down."""

    role = Role.PREFILL
    room_type = Room
    table = SENDER_TABLE
    ABORT, FAULT = SenderEvent.ABORT, SenderEvent.FAULT
    engine_words: ClassVar = {}
    script: ClassVar[dict[SenderState, SenderEvent]] = {
        SenderState.SENDING: SenderEvent.ALL_SENT,
        SenderState.ABORTING: SenderEvent.DRAINED,
    }

    _user_state = staticmethod(user_state)

    def __init__(self, ports: RoomPorts) -> None:
        super().__init__(ports, RoomSettings(geometry=GEOMETRY, limits=SENDER_LIMITS), clock=ManualClock())
        self.done: list[object] = []
        self.depths: list[int] = []

    @staticmethod
    def _next_event(room: Room) -> SenderEvent | None:
        return Scripted.script.get(room.state)

    def _entered(self, room: Room) -> None:
        self.done.append(room.state)
        self.depths.append(len(inspect.stack(0)))

    def _act(self, room: Room, action: SenderAction) -> None:
        self.done.append(action)

    def _at_rest(self, room: Room) -> None:
        self.done.append("rest")

    def _demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        raise NotImplementedError

    def _admitted(self, room: Room, request: AdmissionRequest) -> None:
        raise NotImplementedError

    def late(self, room: Room, limit: str) -> None:
        raise NotImplementedError


@pytest.fixture
def driver() -> Scripted:
    events = RecordedEvents()
    ports = RoomPorts(book=PageBook({IndexSpace.FULL: 4}), workers=FakeWorkers(), engines=FakeEngines(), events=events)
    made = Scripted(ports)
    made.events, made.book = events, ports.book
    return made


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


def test_facts_lead_on_from_an_event_until_nothing_follows(driver, room):
    driver.advance(room, SenderEvent.OFFER)
    opened = SENDER_TABLE.step(SenderState.ADMITTED, SenderEvent.OFFER)[1]
    sent = SENDER_TABLE.step(SenderState.SENDING, SenderEvent.ALL_SENT)[1]
    assert driver.done == [SenderState.SENDING, *opened, SenderState.COMPLETED, *sent, "rest"]
    assert len(set(driver.depths)) == 1, "one transition does not run inside another"
    assert [fact.state.value for fact in driver.events.of(RoomEntered)] == ["offered", "completed"]


def test_without_an_event_only_the_facts_are_looked_at(driver, room):
    driver.advance(room)
    assert (room.state, driver.done) == (SenderState.ADMITTED, ["rest"])


def test_the_first_cause_is_kept_and_told(driver, room, monkeypatch):
    monkeypatch.setattr(Scripted, "script", {})
    driver.advance(room, SenderEvent.OFFER)
    driver.fail(room, "timeout", "too late")
    driver.stop(room, "enough")
    assert (room.state, room.reason_code, room.reason) == (SenderState.FAILING, "timeout", "too late")
    last = driver.events.of(RoomEntered)[-1]
    assert (last.room, last.generation, last.code, last.reason) == (1, 1, "timeout", "too late")


def test_an_event_that_is_not_possible_changes_nothing(driver, room):
    with pytest.raises(ConflictError, match="'drained' is not possible in state 'admitted'"):
        driver.advance(room, SenderEvent.DRAINED)
    assert (room.state, driver.done) == (SenderState.ADMITTED, [])


def test_a_quarantine_is_a_fact_once(driver, room):
    driver.book.reserve(room.owner, {IndexSpace.FULL: 2}, state=PageState.HELD)
    for _ in range(2):
        driver.quarantine(room, Quarantine.NOT_QUIET, "rank pp0.tp0: stuck")
    [fact] = driver.events.of(RoomQuarantined)
    assert (fact.room, fact.cause, fact.reason) == (1, "transport_not_quiet", "rank pp0.tp0: stuck")
    assert driver.book.state(room.owner) is PageState.QUARANTINED
