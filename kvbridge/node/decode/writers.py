"""The writers of a decode node's rooms: the prefill nodes of each room, the rows that each rank owes, and their messages.

Nodes of different instances may have ranks with different names and shares that add up, and still leave pages unwritten, because
the share of a rank follows from the sizes of its instance. Nodes are therefore taken for one instance only if they agree on its
name, its sizes and its stages, and if their ranks are all that such an instance has.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from kvbridge.config.transports import TransportName
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import (
    BridgeError,
    IntegrityError,
    InvalidInputError,
    KeyMismatchError,
    PeerError,
    ProtocolError,
)
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.plan.pairing import Demand, Share, shortfall
from kvbridge.core.session.decode import DecodeState
from kvbridge.core.session.tables import Meaning
from kvbridge.core.wire.messages import (
    MAX_ROOM_METADATA_BYTES,
    Abort,
    Digests,
    Done,
    Drained,
    Failed,
    Intend,
    PathLost,
    Welcome,
)
from kvbridge.node.decode.fence import ALL, Fence
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.node.decode.room import ASKED, DecodeRoom, FromPrefill, WriterNode
from kvbridge.node.room import end_differs
from kvbridge.node.rooms import Rooms
from kvbridge.pool.accounts.book import Owner
from kvbridge.pool.memory.layout import stage_layers
from kvbridge.telemetry.facts import PromptNotKept, RankReceived, RoomRerouted

MOST_SETS = 64
"""Sets of nodes whose shares are remembered at once."""
MOST_WITHDRAWN = 4_096
"""Withdrawals that wait for their nodes. The oldest of more goes: prefill holds its room until `timeouts.offer_s`."""
_REMEDY = "name the nodes of one instance in `prefill`, all of them"


class WrittenRooms(Rooms[DecodeRoom]):
    """The part of a decode node's rooms that finds their writers, hears them, and shuts them out."""

    nodes: PrefillNodes
    fence: Fence
    _manifests: tuple[RankManifest, ...]
    _shares: dict[tuple[Welcome, ...], dict[Rank, Share]]
    """The shares of the ranks of known sets of nodes, for memory with these manifests."""
    withdrawn: dict[tuple[int, int, PeerAddress], tuple[Intend, Abort]]
    """Messages to nodes that are not known yet, about rooms that have ended."""

    def find_writers(self, room: DecodeRoom) -> None:
        """Go on with the room once every prefill node that it names is known; say hello to the others."""
        if room.state not in {DecodeState.AWAITING_PAGES, DecodeState.RESERVED}:
            return
        try:
            found = [self.nodes.known_node(address) for address in room.addresses]
            nodes = [node for node in found if node is not None]
            if len(nodes) < len(found):
                return
            room.writers = self._writers(nodes)
            room.peer, room.peers = nodes[0].incarnation, tuple(node.name for node in nodes)
        except BridgeError as error:
            self.fail(room, error.code, str(error))
        else:
            self.advance(room)

    def _writers(self, known: Sequence[Welcome]) -> dict[str, WriterNode]:
        """Return the writers of a room, by incarnation.

        Raises InvalidInputError, naming nodes, ranks and sizes, unless the nodes are one prefill instance with each of its ranks
        once; UnsupportedError when its sizes do not suit the model.
        """
        manifests = self.workers.manifests()
        is_same = len(manifests) == len(self._manifests) and all(map(operator.is_, manifests, self._manifests))
        if len(self._shares) >= MOST_SETS or not is_same:
            self._shares, self._manifests = {}, manifests
        nodes = tuple({node.incarnation: node for node in known}.values())  # one may have been named by two addresses
        shares = self._shares.get(nodes)
        if shares is None:
            geometry = self.geometry
            shares = self._shares[nodes] = _shares(nodes, geometry, Demand(geometry, manifests))
        return {
            node.incarnation: WriterNode(node, {rank: shares[rank] for rank in node.ranks}, set(node.ranks))
            for node in nodes
        }

    def withdraw(self, room: DecodeRoom) -> None:
        """Tell the prefill nodes of a room, now or when they are known, that this node does not come for it."""
        # Prefill takes an Abort only from the node that has come for the room, so an intent goes before it.
        both = Intend(**room.asked), Abort(**room.about, code=room.reason_code, message=room.reason)
        added = dict.fromkeys(((room.room, room.generation, address) for address in room.addresses), both)
        self.withdrawn |= added
        self._say_withdrawn(added)
        for key in list(self.withdrawn)[: max(0, len(self.withdrawn) - MOST_WITHDRAWN)]:
            del self.withdrawn[key]

    def _say_withdrawn(self, keys: Iterable[tuple[int, int, PeerAddress]]) -> None:
        for key in keys:
            try:
                node = self.nodes.known_node(key[-1])
            except BridgeError:  # the room's callers were told why; this node has nothing to do with that one
                del self.withdrawn[key]
                continue
            if node is not None:
                for message in self.withdrawn.pop(key):
                    self.nodes.send(node.incarnation, message)

    def nodes_changed(self) -> None:
        """Look at every room that waits for prefill nodes: one of them has welcomed or rejected this node, or has vanished."""
        self._say_withdrawn(list(self.withdrawn))
        for room in self.book:
            self.find_writers(room)

    def peer_gone(self, peer: str, reason: str) -> None:
        """Fail the rooms of a prefill node that vanished. Bytes of it may still arrive, even if its process has ended."""
        for room in self.book:
            writer = room.writers.get(peer)
            if writer is None:
                continue
            writer.gone = reason
            if room.state in ASKED and writer.missing:
                why = f"prefill node {writer.node.name} is gone: {reason}"
                self.fail(room, PeerError.code, why)
            self.advance(room)

    # ------------------------------------------------------------------ for the fence

    def open_offers(self) -> set[Owner]:
        """Return the rooms that are being written."""
        return {room.owner for room in self.book if room.state is DecodeState.OFFERED and not room.arrived}

    def shut(self, owners: Mapping[Owner, frozenset[str]]) -> None:
        """Note that nothing can arrive any more from writers of these rooms.

        With `ALL` no writer reaches the room's pages. With some transports, writers that have lost these go on over others.
        """
        for owner, transports in owners.items():
            room = self.book.find(owner.room, owner.generation)
            if room is None:
                continue
            room.shutting.clear()
            room.shut = room.shut or (room.awaits_writers and transports == ALL)
            self.advance(room)

    # ------------------------------------------------------------------ messages of writers

    def hear(self, peer: str, message: FromPrefill) -> None:
        """Take a prefill node's message about a room as `DECODE_HEARS` lists it, or refuse it."""
        room, meaning = self.look_up(peer, message)
        if room is None or meaning is None:
            return
        writer = room.writers[peer]
        who = f"prefill node {writer.node.name}"
        match message:
            case Digests():
                self._expect(room, who, message)
            case Done():
                writer.missing.discard(message.writer)
                if meaning is Meaning.TAKE:
                    self._done(room, writer, message)
                self.advance(room)  # if it crossed an abort, only the proof counts that the writer is quiet
            case PathLost():
                writer.in_transit = True  # should the room fail, every endpoint that the node knows is shut
                if meaning is Meaning.TAKE:
                    self._path_lost(room, writer, message)
            case Failed():
                self.fail(room, message.code, f"{who}: {message.message}")
            case Drained():
                writer.drained, writer.in_transit = True, writer.in_transit or message.in_transit
                if meaning is Meaning.TAKE:
                    self.fail(room, ProtocolError.code, f"{who} stopped without having sent everything")
                self.advance(room)

    def _expect(self, room: DecodeRoom, who: str, message: Digests) -> None:
        assert room.verification is not None, "see speaker_of"
        try:
            room.verification.expect(message)
        except BridgeError as error:  # the rows that arrive could not be compared later
            self.fail(room, ProtocolError.code, f"{who}: {error}")

    def _path_lost(self, room: DecodeRoom, writer: WriterNode, message: PathLost) -> None:
        """Hold the room back until nothing can arrive by a transport that a writer has lost; the writer goes on over another."""
        if message.transport not in set(TransportName):
            why = f"prefill node {writer.node.name} has lost '{message.transport}', which is no transport"
            self.fail(room, ProtocolError.code, why)
            return
        self.events.emit(RoomRerouted(**room.identity, rank=message.writer, lost=message.transport))
        if self.fence.ask_path(room.owner, message.transport, message.epoch):
            room.shutting.add(message.transport)

    def _done(self, room: DecodeRoom, writer: WriterNode, message: Done) -> None:
        """Take the report of a rank that has sent everything; fail the room if the report is wrong."""
        room.begin_by_s = None
        room.amounts = add_amounts(room.amounts, message.amounts)
        room.metadata[str(message.writer)] = message.metadata
        metadata_bytes = sum(map(len, room.metadata.values()))
        if metadata_bytes > MAX_ROOM_METADATA_BYTES:
            why = (
                f"the prefill engines have given {metadata_bytes} bytes of metadata to `finish` on {len(room.metadata)} ranks, a "
                f"room carries at most {MAX_ROOM_METADATA_BYTES}; give it on fewer ranks, or less of it"
            )
            self.fail(room, InvalidInputError.code, why)
            return
        who = f"rank {message.writer} of prefill node {writer.node.name}"
        if differs := self._other_prompt(room, who, message):
            why = f"{who} has computed another prompt than the one that was admitted here: {differs}"
            self.fail(room, KeyMismatchError.code, why)
            return
        room.add_phases(message.phases_s)
        self.events.emit(
            RankReceived(
                **room.about,
                peer=writer.node.incarnation,
                rank=message.writer,
                amounts=message.amounts,
                transport=message.transport,
                under_way_ago_s=message.under_way_ago_s,
            )
        )
        self.show(room)
        self._account(room, writer, who, message)

    def _other_prompt(self, room: DecodeRoom, who: str, done: Done) -> str:
        """Say how the prompt of a writer's engine differs from the room's keys; note a writer that does not state its prompt."""
        if not room.keys:
            return ""
        if not done.keys_digest:
            if room.is_same_prompt:
                why = (
                    f"{who} has not stated the page keys of what it has computed: the room was admitted there without page_hashes, "
                    "or the node does not say which model it holds (tier.model_name)"
                )
                self.events.emit(PromptNotKept(**room.identity, reason=why))
            room.is_same_prompt = False
            return ""
        room.end_keys.add(done.end_key)
        if done.keys_digest != room.keys.digest:
            return "the page_hashes of both admissions differ"
        if end_differs(room.end_keys):
            return "its last page, which is not whole, ends with other tokens than that of another rank"
        return ""

    def _account(self, room: DecodeRoom, writer: WriterNode, who: str, done: Done) -> None:
        """Fail closed unless a rank reports exactly the rows that it owes, and all its digests; go on once every rank has."""
        if room.verification is not None:
            try:
                room.verification.require_all(done)
            except ProtocolError as error:
                self.fail(room, error.code, str(error))
                return
        reported = {kind: amount.lane_rows for kind, amount in done.amounts.items()}
        owed = writer.shares[done.writer].rows(prompt_tokens=room.prompt_tokens, prefix_tokens=room.prefix_tokens)
        if wrong := shortfall(owed, reported):
            self.fail(room, IntegrityError.code, f"{who} is done, but {wrong}")
        elif not any(other.missing for other in room.writers.values()):
            room.arrived = True


def _shares(nodes: Sequence[Welcome], geometry: ModelGeometry, demand: Demand) -> dict[Rank, Share]:
    first = nodes[0]
    for node in nodes[1:]:
        if _parallelism(node) != _parallelism(first):
            raise InvalidInputError(
                f"prefill nodes {_described(first)} and {_described(node)} are not of one instance; {_REMEDY}"
            )
    _check_complete(nodes)
    stages = [
        stage_layers(geometry.layer_count, first.pp_size, stage, first.stage_boundaries)
        for stage in range(first.pp_size)
    ]
    shares = {
        rank: demand.share(rank, tp_size=first.tp_size, layers=stages[rank.pp]) for node in nodes for rank in node.ranks
    }
    if wrong := demand.uncovered(shares.values()):
        raise InvalidInputError(f"prefill instance {first.instance} would not write what this node needs: {wrong}")
    return shares


def _check_complete(nodes: Sequence[Welcome]) -> None:
    first, holders = nodes[0], dict[Rank, Welcome]()
    for node in nodes:
        if not node.ranks:
            raise InvalidInputError(f"prefill node {_described(node)} has no rank; leave it out of `prefill`")
        for rank in node.ranks:
            if rank.pp >= first.pp_size or rank.tp >= first.tp_size:
                raise InvalidInputError(
                    f"prefill node {_described(node)} has rank {rank}, which such an instance does not have"
                )
            if rank in holders:
                raise InvalidInputError(
                    f"prefill nodes {_described(holders[rank])} and {_described(node)} both hold rank {rank}; {_REMEDY}"
                )
            holders[rank] = node
    if len(holders) < first.pp_size * first.tp_size:
        every = (Rank(pp=pp, tp=tp) for pp in range(first.pp_size) for tp in range(first.tp_size))
        missing = next(rank for rank in every if rank not in holders)
        named = ", ".join(map(_described, nodes))
        raise InvalidInputError(f"rank {missing} of prefill instance {first.instance} is on none of {named}; {_REMEDY}")


def _parallelism(node: Welcome) -> tuple[object, ...]:
    return node.instance, node.pp_size, node.tp_size, node.stage_boundaries


def _described(node: Welcome) -> str:
    stages = f", stages from layers {node.stage_boundaries}" if node.stage_boundaries else ""
    ranks = ", ".join(map(str, node.ranks[:8])) + (", ..." if len(node.ranks) > 8 else "")
    return f"{node.name} (ranks {ranks or 'none'} of pp_size {node.pp_size} x tp_size {node.tp_size}{stages})"
