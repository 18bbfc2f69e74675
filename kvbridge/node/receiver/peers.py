"""What prefill nodes say about the rooms of a decode node, who writes each of them, and who cannot any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge.config.transports import TransportName
from kvbridge.core.errors import (
    BridgeError,
    IntegrityError,
    InvalidInputError,
    KeyMismatchError,
    PeerError,
    ProtocolError,
)
from kvbridge.core.plan.accounting import shortfall
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.session.hearing import Meaning
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.wire.messages import MAX_ROOM_METADATA_BYTES, Digests, Done, Drained, Failed, PathLost
from kvbridge.node.driver import RoomDriver
from kvbridge.node.handshake.prefill_nodes import PrefillNodes
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.prompt_keys import end_differs
from kvbridge.node.receiver.fence import ALL, Fence
from kvbridge.node.receiver.room import ASKED, FromPrefill, ReceiverRoom, WriterNode
from kvbridge.node.receiver.withdrawals import Withdrawals
from kvbridge.node.receiver.writers import WriterSets
from kvbridge.node.room import slowest
from kvbridge.node.room_book import RoomBook
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.pages import Owner
from kvbridge.telemetry.events import PromptNotKept, RankReceived
from kvbridge.telemetry.path_events import RoomRerouted


@dataclass(frozen=True, slots=True)
class RoomWriters:
    """Who writes the rooms. Hears of prefill nodes and of the fence. Called from the event loop's thread only."""

    rooms: RoomBook[ReceiverRoom]
    driver: RoomDriver[ReceiverRoom]
    nodes: PrefillNodes
    workers: WorkerSet
    sets: WriterSets
    withdrawals: Withdrawals

    def find(self, room: ReceiverRoom) -> None:
        """Go on with the room once every prefill node that it names is known; those that are not are said hello to."""
        if room.state not in {ReceiverState.AWAITING_PAGES, ReceiverState.RESERVED}:
            return
        try:
            found = [self.nodes.known_node(address) for address in room.addresses]
            nodes = [node for node in found if node is not None]
            if len(nodes) < len(found):
                return
            room.writers = self.sets.writers(nodes, self.workers.manifests())
            room.peers = tuple(node.name for node in nodes)
        except BridgeError as error:
            self.driver.fail(room, error.code, str(error))
        else:
            self.driver.advance(room)

    def nodes_changed(self) -> None:
        """A prefill node welcomed or rejected us, or vanished: look at every room that still waits for one."""
        self.withdrawals.settle()
        for room in self.rooms:
            self.find(room)

    def peer_gone(self, peer: str, reason: str) -> None:
        """A prefill node vanished. Whether its process has ended or not, it may have sent what has not arrived yet."""
        for room in self.rooms:
            writer = room.writers.get(peer)
            if writer is None:
                continue
            writer.gone = reason
            if room.state in ASKED and writer.missing:
                why = f"prefill node {writer.node.name} is gone: {reason}"
                self.driver.fail(room, PeerError.code, why)
            self.driver.advance(room)

    def open_offers(self) -> set[Owner]:
        """Rooms that are being written to."""
        return {room.owner for room in self.rooms if room.state is ReceiverState.OFFERED and not room.arrived}

    def shut(self, owners: Mapping[Owner, frozenset[str]]) -> None:
        """Whoever wrote to these rooms cannot reach this node any more, nor can anything arrive that was on its way.

        Or not by the transports that writers of a room have lost, which goes on.
        """
        for owner, transports in owners.items():
            room = self.rooms.find(owner.room, owner.generation)
            if room is None:
                continue
            room.shutting.clear()
            room.shut = room.shut or (room.awaits_writers and transports == ALL)
            self.driver.advance(room)


@dataclass(frozen=True, slots=True)
class ReceiverPeers:
    """What writers say. Called from the event loop's thread only."""

    driver: RoomDriver[ReceiverRoom]
    hearing: RoomHearing[ReceiverRoom]
    fence: Fence

    def hear(self, peer: str, message: FromPrefill) -> None:
        """Take what a prefill node says of a room as `RECEIVER_HEARS` has it, or refuse it."""
        room, meaning = self.hearing.look_up(peer, message, kind=message.type)
        if room is None or meaning is None:
            return
        writer = room.writers[peer]
        match message:
            case Digests():
                self._digests(room, writer, message)
            case Done():
                writer.missing.discard(message.writer)
                if meaning is Meaning.TAKE:
                    self._done(room, writer, message)
                else:
                    self.driver.advance(room)  # it crossed our abort; that the writer is quiet counts all the same
            case PathLost():
                writer.in_transit = True  # should the room fail, everything that the node knows of is shut
                if meaning is Meaning.TAKE:
                    self._path_lost(room, writer, message)
            case Failed():
                self.driver.fail(room, message.code, f"prefill node {writer.node.name}: {message.message}")
            case Drained():
                writer.drained, writer.in_transit = True, writer.in_transit or message.in_transit
                if meaning is Meaning.TAKE:
                    why = f"prefill node {writer.node.name} stopped without having sent everything"
                    self.driver.fail(room, ProtocolError.code, why)
                self.driver.advance(room)

    def _digests(self, room: ReceiverRoom, writer: WriterNode, message: Digests) -> None:
        """A writer says what it has sent. What cannot be right fails the room: nobody could say later what arrived."""
        assert room.verification is not None, "see speaker_of"
        try:
            room.verification.expect(message)
        except BridgeError as error:
            self.driver.fail(room, ProtocolError.code, f"prefill node {writer.node.name}: {error}")

    def _done(self, room: ReceiverRoom, writer: WriterNode, message: Done) -> None:
        """A writer has sent everything that was its to send."""
        room.begin_by_s = None
        room.amounts = add_amounts(room.amounts, message.amounts)
        room.metadata[str(message.writer)] = message.metadata
        metadata_bytes = sum(map(len, room.metadata.values()))
        if metadata_bytes > MAX_ROOM_METADATA_BYTES:
            why = (
                f"the prefill engines have given {metadata_bytes} bytes of metadata to `finish` on {len(room.metadata)} ranks, a "
                f"room carries at most {MAX_ROOM_METADATA_BYTES}; give it on fewer ranks, or less of it"
            )
            self.driver.fail(room, InvalidInputError.code, why)
            return
        if not self._compare_prompts(room, writer, message):
            return
        slowest(room.phases_s, message.phases_s)
        self.driver.facts.events.emit(
            RankReceived(
                room=room.room,
                generation=room.generation,
                peer=writer.node.peer,
                rank=message.writer,
                amounts=message.amounts,
                transport=message.transport,
                under_way_ago_s=message.under_way_ago_s,
            )
        )
        self.driver.facts.show(room)
        self._account(room, writer, message)

    def _compare_prompts(self, room: ReceiverRoom, writer: WriterNode, done: Done) -> bool:
        """Fail a room whose writer has computed another prompt than its keys name; note one that does not say."""
        if not room.keys:
            return True
        who = f"rank {done.writer} of prefill node {writer.node.name}"
        if not done.keys_digest:
            if room.is_same_prompt:
                why = (
                    f"{who} has not stated the page keys of what it has computed: the room was admitted there without page_hashes, "
                    "or the node does not say which model it holds (tier.model_name)"
                )
                self.driver.facts.events.emit(PromptNotKept(**room.identity, reason=why))
            room.is_same_prompt = False
            return True
        room.end_keys.add(done.end_key)
        if done.keys_digest == room.keys.digest and not end_differs(room.end_keys):
            return True
        differs = "the page_hashes of both admissions differ"
        if done.keys_digest == room.keys.digest:
            differs = "its last page, which is not whole, ends with other tokens than that of another rank"
        why = f"{who} has computed another prompt than the one that was admitted here: {differs}"
        self.driver.fail(room, KeyMismatchError.code, why)
        return False

    def _account(self, room: ReceiverRoom, writer: WriterNode, done: Done) -> None:
        """Fail closed unless a rank reports exactly what it owes, and all its digests; commit or verify once every rank has."""
        try:
            if room.verification is not None:
                room.verification.require_all(done)
        except ProtocolError as error:
            self.driver.fail(room, error.code, str(error))
            return
        reported = {kind: amount.lane_rows for kind, amount in done.amounts.items()}
        owed = writer.shares[done.writer].rows(prompt_tokens=room.prompt_tokens, prefix_tokens=room.prefix_tokens)
        wrong = shortfall(owed, reported)
        if wrong:
            why = f"rank {done.writer} of prefill node {writer.node.name} is done, but {wrong}"
            self.driver.fail(room, IntegrityError.code, why)
            return
        if any(writer.missing for writer in room.writers.values()):
            return
        room.arrived = True
        self.driver.advance(room)

    def _path_lost(self, room: ReceiverRoom, writer: WriterNode, message: PathLost) -> None:
        """A writer goes on over another transport: the room is not read before nothing can arrive by the lost one any more."""
        if message.transport not in set(TransportName):
            why = f"prefill node {writer.node.name} has lost '{message.transport}', which is no transport"
            self.driver.fail(room, ProtocolError.code, why)
            return
        lost = RoomRerouted(**room.identity, rank=message.writer, lost=message.transport)
        self.driver.facts.events.emit(lost)
        if self.fence.ask_path(room.owner, message.transport, message.epoch):
            room.shutting.add(message.transport)
