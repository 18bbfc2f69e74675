"""The rooms of a prefill node, whose pages an engine fills and rank workers send."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.progress import RankProgress
from kvbridge.core.session.sender import SENDER_HEARS
from kvbridge.core.wire.engine_messages import AbortRoom, AskRestorable, Begin, Finish, Loaded, Publish, Release
from kvbridge.node.driver import Deadlines, RoomDriver
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_facts import RoomFacts
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.node.rooms import RoomEngines, RoomRequests, Rooms
from kvbridge.node.sender.checkpoints import RoomCheckpoints
from kvbridge.node.sender.offers import EarlyOffers
from kvbridge.node.sender.orders import Orders
from kvbridge.node.sender.peers import SenderPeers
from kvbridge.node.sender.room import RankWork, SenderPorts, SenderRoom, speaker_of, user_state
from kvbridge.node.sender.rules import ENGINE_WORDS, SenderRules
from kvbridge.node.sender.verbs import SenderVerbs
from kvbridge.node.sender.workers import SenderWorkers
from kvbridge.node.workers import WorkerSet


@dataclass(frozen=True, slots=True)
class SenderAdmission:
    """Implements AdmittingSide."""

    room_type = SenderRoom
    pages: RoomPages
    workers: WorkerSet
    checkpoints: RoomCheckpoints
    peers: SenderPeers

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Count the pages that a request takes."""
        if request.prefill:
            raise InvalidInputError("`prefill` is for the decode daemon; a prefill daemon sends to whoever offers it")
        return self.pages.needed(request.prompt_tokens, request.prompt_tokens)

    def admitted(self, room: SenderRoom, request: AdmissionRequest) -> None:
        """Begin the first wait of a room."""
        limits = self.pages.settings.limits
        for rank, layers in self.workers.layers.items():
            progress = RankProgress(layers, prompt_tokens=room.prompt_tokens, computed_tokens=room.published_tokens)
            room.ranks[rank] = RankWork(progress)
        self.checkpoints.admitted(room)
        room.wait_until(room.created_s + limits.offer_s, "timeouts.offer_s")
        if not room.admitted_by:
            self.peers.rooms.begin_within(room, request.begin_within_s, or_else=(limits.begin_s, "timeouts.begin_s"))
        self.peers.admitted(room)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderRooms(Rooms[SenderRoom]):
    """All rooms of a prefill node, by who has to do with them."""

    peers: SenderPeers
    workers: SenderWorkers


def sender_rooms(ports: SenderPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> SenderRooms:
    """Put the rooms of a prefill node together."""
    book = RoomBook[SenderRoom](Role.PREFILL, user_state, clock=clock, keep_s=settings.limits.room_keep_s)
    facts = RoomFacts(book, ports.engines, ports.events, ENGINE_WORDS, clock)
    pages = RoomPages(ports.book, settings, ports.events, ports.prefixes, computes=True)
    checkpoints = RoomCheckpoints(pages)
    orders = Orders(ports, book, pages, clock)
    driver: RoomDriver[SenderRoom] = RoomDriver(
        SenderRules(facts, pages, orders, checkpoints, ports.nodes, clock), facts
    )
    hearing = RoomHearing(SENDER_HEARS, book, facts, speaker_of)
    workers = SenderWorkers(book, driver, hearing, pages, orders, ports.nodes, clock)
    early = EarlyOffers(wait_s=settings.limits.early_offer_s, clock=clock)
    peers = SenderPeers(book, driver, hearing, workers, ports.nodes, early, settings.geometry, clock)
    engines = RoomEngines(book, driver, pages)
    verbs = SenderVerbs(book, driver, pages, orders, workers, checkpoints, clock)
    admission = SenderAdmission(pages, ports.workers, checkpoints, peers)
    return SenderRooms(
        book=book,
        driver=driver,
        requests=RoomRequests(book, driver, pages, ports.workers, admission, clock, ports.store),
        engines=engines,
        calls={
            AskRestorable: verbs.restorable,
            Begin: verbs.begin,
            Loaded: verbs.loaded,
            Publish: orders.publish,
            Finish: verbs.finish,
            Release: verbs.release,
            AbortRoom: engines.abort,
        },
        deadlines=Deadlines(book, driver, clock),
        peers=peers,
        workers=workers,
    )
