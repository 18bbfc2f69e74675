"""The rooms of a decode node, whose pages prefill nodes write and an engine then reads."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.receiver import RECEIVER_HEARS, ReceiverEvent, ReceiverState
from kvbridge.core.wire.engine_messages import AbortRoom, Claim, Extend, Loaded, Provide, Release
from kvbridge.node.driver import Deadlines, RoomDriver
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.receiver.peers import ReceiverPeers, RoomWriters
from kvbridge.node.receiver.room import ReceiverPorts, ReceiverRoom, speaker_of, user_state
from kvbridge.node.receiver.rules import ENGINE_WORDS, ReceiverRules
from kvbridge.node.receiver.verbs import ReceiverVerbs
from kvbridge.node.receiver.withdrawals import Withdrawals
from kvbridge.node.receiver.workers import ReceiverWorkers
from kvbridge.node.receiver.writers import WriterSets
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_facts import RoomFacts
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.node.rooms import RoomEngines, RoomRequests, Rooms


@dataclass(frozen=True, slots=True)
class ReceiverAdmission:
    """Implements AdmittingSide."""

    room_type = ReceiverRoom
    driver: RoomDriver[ReceiverRoom]
    pages: RoomPages
    writers: RoomWriters

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Count the pages that a request takes."""
        if not request.prefill:
            raise InvalidInputError(
                "a decode daemon needs `prefill`: the control addresses of the prefill nodes that will write"
            )
        return self.pages.needed(request.prompt_tokens + request.max_new_tokens, request.prompt_tokens)

    def admitted(self, room: ReceiverRoom, request: AdmissionRequest) -> None:
        """Begin the first wait of a room."""
        settings = self.pages.settings
        room.peers = tuple(address.endpoint for address in request.prefill)
        room.addresses, room.reserved_tokens = request.prefill, request.prompt_tokens + request.max_new_tokens
        self.writers.rooms.begin_within(room, request.begin_within_s)
        if settings.adopted:
            if room.admitted_by:
                room.wait_until(room.created_s + settings.limits.handshake_s, "timeouts.handshake_s")
            else:
                room.wait_until(room.created_s + settings.limits.pages_s, "timeouts.pages_s")
                self.driver.facts.tell_engine(room)
            self.writers.find(room)
        else:
            self.driver.advance(room, ReceiverEvent.PAGES)
            self.writers.find(room)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRooms(Rooms[ReceiverRoom]):
    """All rooms of a decode node, by who has to do with them."""

    writers: RoomWriters
    peers: ReceiverPeers
    workers: ReceiverWorkers


def receiver_rooms(ports: ReceiverPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> ReceiverRooms:
    """Put the rooms of a decode node together."""
    book = RoomBook[ReceiverRoom](Role.DECODE, user_state, clock=clock, keep_s=settings.limits.room_keep_s)
    facts = RoomFacts(book, ports.engines, ports.events, ENGINE_WORDS, clock)
    slots = frozenset({IndexSpace.REQUEST})  # of the hot buffer, where the model's own state needs none
    pages = RoomPages(ports.book, settings, ports.events, ports.prefixes, always=slots)
    withdrawals = Withdrawals(ports.nodes)
    driver: RoomDriver[ReceiverRoom] = RoomDriver(ReceiverRules(ports, facts, pages, withdrawals, clock), facts)
    writers = RoomWriters(book, driver, ports.nodes, ports.workers, WriterSets(settings.geometry), withdrawals)
    waiting = frozenset({ReceiverState.AWAITING_PAGES, ReceiverState.INTENDED, ReceiverState.COMMITTED})
    engines = RoomEngines(book, driver, pages, waiting)
    verbs = ReceiverVerbs(book, driver, pages, writers, clock)
    admission = ReceiverAdmission(driver, pages, writers)
    hearing = RoomHearing(RECEIVER_HEARS, book, facts, speaker_of)
    return ReceiverRooms(
        book=book,
        driver=driver,
        requests=RoomRequests(book, driver, pages, ports.workers, admission, clock, ports.store),
        engines=engines,
        calls={
            Provide: verbs.provide,
            Claim: verbs.claim,
            Loaded: verbs.loaded,
            Extend: verbs.extend,
            Release: verbs.release,
            AbortRoom: engines.abort,
        },
        deadlines=Deadlines(book, driver, clock),
        writers=writers,
        peers=ReceiverPeers(driver, hearing, ports.fence),
        workers=ReceiverWorkers(book, driver, hearing),
    )
