"""The decode nodes that a prefill node writes to: from their Hello until they are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, KeysView
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog

from kvbridge.api.status import DecodeNodeStatus
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    DeadlineError,
    FingerprintMismatchError,
    InvalidInputError,
    NotReadyError,
    PeerError,
    UnauthorizedError,
)
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import check_manifest, first_difference
from kvbridge.core.ids import Rank, Role
from kvbridge.core.prefixes import identity_conflict
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.codec import unpack_rank
from kvbridge.core.wire.messages import (
    FEATURES,
    REASON_CHARS,
    Abort,
    Drained,
    Failed,
    Features,
    Heartbeat,
    Hello,
    Intend,
    NodeDescription,
    Offer,
    PeerMessage,
    Rejected,
    Welcome,
    agree,
)
from kvbridge.core.wire.worker_messages import ConnectPeer, DisconnectPeer, PathsChanged, PeerConnected
from kvbridge.node.workers import WorkerSet, WorkerState
from kvbridge.telemetry.facts import EventStream, PathLost, PathsFound, PeerAccepted, PeerLost, PeerRejected

if TYPE_CHECKING:
    from kvbridge.node.prefill.rooms import PrefillRooms

log = structlog.get_logger(__name__)

MOST_MESSAGES = 1_024
"""Messages that wait for the check of one introduction, at most."""
MOST_PEER_BYTES = 16 << 20
MOST_BYTES = 256 << 20
"""Memory of the messages that wait for one introduction, and for all, at most."""
MESSAGE_BYTES = 4_096
"""Memory of a message beside its page tables or packed ranks."""

Ended = Callable[[BaseException | None], None]


class Links(Protocol):
    """The connections to decode nodes: `daemon/prefill.py`. Only `key_of` raises."""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message to a known or unknown peer."""

    def key_of(self, peer: str) -> str:
        """Return the public key that a connected peer has proved to own; empty without keys. Raises NotFoundError."""

    def names_of(self, key: str) -> frozenset[str]:
        """Return the instances that the holder of a key may speak for; empty: any."""

    def inspect(self, work: Callable[[], None], ended: Ended) -> None:
        """Call `work` off the loop, each after the one before it, and `ended` on the loop with the error that `work` has raised."""


class ClaimedName(NamedTuple):
    """A node's name, and the public key that it was proved with (empty without keys)."""

    instance: str
    node: str
    key: str

    def __str__(self) -> str:
        return f"{self.instance}/{self.node}"


@dataclass(eq=False)
class _KnownDecode:
    name: ClaimedName
    ranks: tuple[bytes, ...]
    """The descriptions of the node's memory, packed, as workers get them."""
    features: tuple[str, ...]
    """The agreed features."""
    connecting: dict[Rank, int]
    """ConnectPeer orders that a rank's worker has not answered yet; only the answer to the last one counts."""
    transports: dict[Rank, tuple[str, ...]] = field(default_factory=dict)
    """The transports by which each rank of ours reaches the node: one for each of its ranks, in their order."""
    transport: dict[Rank, str] = field(default_factory=dict)
    """The same in one text, for the facts about every order of that rank."""
    standby: dict[Rank, tuple[str, ...]] = field(default_factory=dict)

    def reaches(self, rank: Rank, transports: tuple[str, ...]) -> None:
        self.transports[rank], self.transport[rank] = transports, "+".join(sorted(set(transports)))

    @property
    def waiting(self) -> list[Rank]:
        """Ranks that are not ready to write to the node."""
        return [rank for rank, orders in self.connecting.items() if orders]


@dataclass(eq=False)
class _Mailbox:
    """An introduction that is being checked, and the peer's later messages: an offer that follows changed memory waits for it."""

    peer: str
    hello: Hello
    claim: ClaimedName
    expires_s: float
    wanted: bool = True
    bytes: int = 0
    messages: deque[PeerMessage] = field(default_factory=deque)


@dataclass(eq=False)
class DecodeNodes:
    """The decode nodes that a prefill node writes to.

    A peer's manifests are checked in full before a worker sees them, so that no address is ever computed from something unchecked.
    The check runs off the event loop. Only the packed bytes of a peer's description are kept.
    """

    introduction: Welcome
    geometry: ModelGeometry
    workers: WorkerSet
    links: Links
    events: EventStream
    check_s: float
    """Limit of the check of an introduction (`timeouts.handshake_s`)."""
    clock: Clock = monotonic
    rooms: PrefillRooms = field(init=False)
    """Set before anybody says hello."""
    _known: dict[str, _KnownDecode] = field(init=False, default_factory=dict)
    _mailboxes: dict[str, _Mailbox] = field(init=False, default_factory=dict)
    """By peer: the introductions that are being checked."""

    def __post_init__(self) -> None:
        self.send = self.links.send

    # ------------------------------------------------------------------ messages of decode nodes

    def received(self, peer: str, message: PeerMessage) -> None:
        """Take a message of a decode node. Raises the BridgeError for which rooms refuse it."""
        mailbox = self._mailboxes.get(peer)
        if mailbox is not None:
            try:
                self._account(mailbox, message)
                mailbox.messages.append(message)
            except CapacityError as error:
                self._reject(peer, error.code, str(error))
            return
        match message:
            case Hello():
                self._hello(peer, message)
            case Intend() | Offer() if peer not in self._known:  # nobody writes to memory that was never introduced
                text = f"an {message.type} for room {message.room} from {peer}, which has not been welcomed here"
                self.events.frame_refused("unmet", text)
                why = "this prefill node does not know you (any more): say hello first"
                about = {"room": message.room, "generation": message.generation}
                self.send(peer, Failed(**about, code=NotReadyError.code, message=why))
                if isinstance(message, Offer):  # an offer may follow an intent
                    self.send(peer, Drained(**about))
            case Abort() if peer not in self._known:
                text = f"an abort of room {message.room} from {peer}, which is not welcome here"
                self.events.frame_refused("unmet", text)
                self.rooms.hear(peer, message)  # it ends the peer's own rooms only
            case Intend() | Offer() | Abort() | Failed():
                self.rooms.hear(peer, message)
            case Heartbeat():
                pass
            case _:
                text = f"{message.type} from {peer}: a prefill daemon does not take it"
                self.events.frame_refused("wrong_direction", text)

    def _hello(self, peer: str, hello: Hello) -> None:
        """Take the introduction of a decode node: its first one, or one after it changed."""
        node = hello.node
        try:
            claim = ClaimedName(node.instance, node.node, self.links.key_of(peer))
            self._check_name(peer, node, claim)
            agreed = self._agree(node, hello.features)
            known = self._known.get(peer)
            if known is None or (known.name[:2], known.ranks) != (claim[:2], node.ranks):
                mailbox = _Mailbox(peer, hello, claim, self.clock() + self.check_s)
                self._account(mailbox, hello)
                self._mailboxes[peer] = mailbox
                ours, require = self.introduction, partial(self._require, mailbox)
                work = partial(check_introduction, node, ours, self.geometry, require)
                self.links.inspect(work, partial(self._inspected, mailbox))
                return
            known.features = agreed
            if not known.waiting:
                self._welcome(peer)
        except BridgeError as error:
            self._reject(peer, error.code, str(error))

    def _agree(self, node: NodeDescription, theirs: Features) -> tuple[str, ...]:
        us, them = f"prefill instance {self.introduction.instance}", f"decode instance {node.instance}"
        return agree(FEATURES, theirs, us=us, them=them)

    # ------------------------------------------------------------------ checks of introductions

    def _account(self, mailbox: _Mailbox, message: PeerMessage) -> None:
        mailbox.bytes += MESSAGE_BYTES
        match message:
            case Offer():
                mailbox.bytes += sum(len(table.ids) for table in message.tables)
            case Hello():
                mailbox.bytes += sum(map(len, message.node.ranks))
        of_others = sum(other.bytes for other in self._mailboxes.values() if other is not mailbox)
        is_too_much = mailbox.bytes > min(MOST_PEER_BYTES, MOST_BYTES - of_others)
        if is_too_much or len(mailbox.messages) >= MOST_MESSAGES:
            raise CapacityError("too much waits for introductions to be checked; try again shortly")

    def _require(self, mailbox: _Mailbox) -> None:
        """Raise when nobody waits for the outcome of a check any more. Called off the loop."""
        if not mailbox.wanted:
            raise PeerError("the peer was given up while its introduction was checked")
        if self.clock() > mailbox.expires_s:
            raise DeadlineError(
                f"its introduction could not be checked within {self.check_s:g} s (timeouts.handshake_s): this node is too "
                "busy, or it names too much memory"
            )

    def _inspected(self, mailbox: _Mailbox, error: BaseException | None) -> None:
        peer, hello, claim = mailbox.peer, mailbox.hello, mailbox.claim
        if self._mailboxes.get(peer) is not mailbox:
            return
        del self._mailboxes[peer]
        if error is None:
            try:
                self._check_name(peer, hello.node, claim)  # others may have come meanwhile
                self._connect(peer, hello, claim)
            except BridgeError as refusal:
                error = refusal
        if isinstance(error, BridgeError):
            self._reject(peer, error.code, str(error))
        elif error is not None:
            log.error("inspection_failed", peer=peer, exc_info=error)
            self._reject(peer, BridgeError.code, f"its introduction could not be checked: {type(error).__name__}")
        while mailbox.messages:
            try:
                self.received(peer, mailbox.messages.popleft())
            except BridgeError as refusal:
                self.events.frame_refused(refusal.code, str(refusal))

    def close(self) -> None:
        """Let a check that is under way end after the rank that it looks at."""
        for mailbox in self._mailboxes.values():
            mailbox.wanted = False
        self._mailboxes.clear()

    # ------------------------------------------------------------------ coming and going

    def _connect(self, peer: str, hello: Hello, claim: ClaimedName) -> None:
        for old, other in list(self._known.items()):
            if old != peer and other.name[:2] == claim[:2]:
                self.gone(old, f"it was restarted (now {peer})")
        known, ranks = self._known.get(peer), hello.node.ranks
        connecting = dict.fromkeys(self.workers.layers, 0) if known is None else known.connecting
        self._known[peer] = _KnownDecode(claim, ranks, self._agree(hello.node, hello.features), connecting)
        states = self.workers.states()
        for rank in connecting:
            connecting[rank] += 1
            if states[rank] is WorkerState.READY:  # the others get their order when they are (`worker_ready`)
                self.workers.send(rank, ConnectPeer(peer=peer, ranks=ranks))

    def _check_name(self, peer: str, node: NodeDescription, claim: ClaimedName) -> None:
        present = [other.name for one, other in self._known.items() if one != peer]
        check_name(claim, bound_to=self.links.names_of(claim.key), present=present)
        if node.role is not Role.DECODE or node.incarnation != peer:
            raise InvalidInputError(
                f"hello must come from a decode node in its own name, got role {node.role} as {node.incarnation}"
            )

    def _reject(self, peer: str, code: str, reason: str) -> None:
        """Tell a peer that the two nodes cannot work together (any more); its rooms end first."""
        self.events.emit(PeerRejected(peer=peer, code=code, reason=reason))
        self._forget(peer, f"it was rejected: {reason}")
        self.send(peer, Rejected(code=code, message=reason[:REASON_CHARS]))

    def _welcome(self, peer: str) -> None:
        self.send(peer, self.introduction)
        known = self._known[peer]
        self.events.emit(PeerAccepted(peer=peer, name=str(known.name), features=known.features))

    def gone(self, peer: str, reason: str) -> None:
        """Give up a peer that has ended, is silent, or begins anew. Harmless for one that is not known."""
        if peer in self._known:
            self.events.emit(PeerLost(peer=peer, reason=reason))
        self._forget(peer, reason)

    def _forget(self, peer: str, reason: str) -> None:
        """Forget a peer, and its messages since its check began."""
        mailbox = self._mailboxes.pop(peer, None)
        if mailbox is not None:
            mailbox.wanted = False
            mailbox.messages.clear()
        if self._known.pop(peer, None) is not None:
            for rank in self.workers.layers:
                self.workers.send(rank, DisconnectPeer(peer=peer))
            self.rooms.peer_gone(peer, reason)

    # ------------------------------------------------------------------ messages of rank workers

    def worker_ready(self, rank: Rank) -> None:
        """Connect a rank worker that is (back) at work to every known peer."""
        for peer, known in self._known.items():
            known.connecting[rank] = 1
            self.workers.send(rank, ConnectPeer(peer=peer, ranks=known.ranks))

    def worker_connected(self, message: PeerConnected) -> None:
        """Note that a rank worker can write to a peer, or reject the peer when the worker cannot."""
        peer, rank = message.peer, message.rank
        known = self._known.get(peer)
        if known is None or rank not in known.connecting:
            return
        known.connecting[rank] = max(0, known.connecting[rank] - 1)
        if known.connecting[rank]:
            return  # the answer to an order that a later one has replaced
        known.reaches(rank, message.transports)
        if message.error_code:
            self._reject(peer, message.error_code, message.error)
        elif not known.waiting:
            self._welcome(peer)

    def paths_changed(self, message: PathsChanged) -> None:
        """Note that a rank worker reaches a peer by other transports than before."""
        peer, rank, transports = message.peer, message.rank, message.transports
        known = self._known.get(peer)
        if known is None or rank not in known.connecting:
            return
        known.reaches(rank, transports)
        known.standby[rank] = message.standby
        if message.lost:
            lost = PathLost(peer=peer, rank=rank, transport=message.lost, transports=transports, reason=message.error)
            self.events.emit(lost)
        else:
            self.events.emit(PathsFound(peer=peer, rank=rank, transports=transports, standby=message.standby))

    # ------------------------------------------------------------------ known nodes

    def name(self, peer: str) -> str:
        """Return the name of a decode node as INSTANCE/NODE; its incarnation when it is not known."""
        known = self._known.get(peer)
        return peer if known is None else str(known.name)

    def transport(self, peer: str, rank: Rank) -> str:
        """Return the transport by which a rank of ours reaches a peer; several, where its ranks differ, are joined by '+'."""
        known = self._known.get(peer)
        return known.transport.get(rank, "") if known is not None else ""

    def known(self) -> KeysView[str]:
        """Return the incarnations of all known peers."""
        return self._known.keys()

    def peers(self) -> tuple[DecodeNodeStatus, ...]:
        """Return the state of every known node, for `/status`."""
        return tuple(
            DecodeNodeStatus(
                instance=known.name.instance,
                node=known.name.node,
                incarnation=peer,
                transports={str(rank): tuple(names) for rank, names in known.transports.items()},
                standby={str(rank): names for rank, names in known.standby.items()},
                connecting=tuple(sorted(map(str, known.waiting))),
                features=tuple(known.features),
            )
            for peer, known in self._known.items()
        )


def check_introduction(
    node: NodeDescription, ours: Welcome, geometry: ModelGeometry, require_wanted: Callable[[], None]
) -> None:
    """Check the model and the memory that a decode node describes, in time bounded by its length; called off the loop.

    `require_wanted()` raises when the outcome does not matter any more. Raises FingerprintMismatchError, which names the first
    difference, and all that `unpack_rank` and `check_manifest` raise.
    """
    require_wanted()
    conflict = identity_conflict(ours.model_identity, node.model_identity)
    if difference := first_difference(geometry, node.geometry) or conflict:
        raise FingerprintMismatchError(
            f"prefill instance {ours.instance} and decode instance {node.instance} hold different models: {difference}"
        )
    if not node.ranks:
        raise InvalidInputError(f"decode node {node.instance}/{node.node} has no rank that is ready")
    for packed in node.ranks:
        require_wanted()
        check_manifest(unpack_rank(packed).manifest, geometry)


def check_name(claim: ClaimedName, *, bound_to: frozenset[str], present: Iterable[ClaimedName]) -> None:
    """Raise UnauthorizedError unless the holder of a key may use a name.

    `bound_to`: the instances that the key is bound to; empty: any. `present`: the names in use by other incarnations. A new
    incarnation of a node ends its old one with all its rooms, so it must be proved by the same key, or by one that is bound to
    the instance expressly.
    """
    if bound_to and claim.instance not in bound_to:
        raise UnauthorizedError(
            f"the key {claim.key} speaks for instance {', '.join(sorted(bound_to))}, not for {claim.instance}: correct "
            "`instance` there, or the key's entry in control.curve.allowed_keys_file here"
        )
    for other in present:
        if other[:2] == claim[:2] and other.key != claim.key and not bound_to:
            raise UnauthorizedError(
                f"node {claim} is known here under another key than {claim.key}: two nodes use "
                "one name, or its key was changed; then bind the new key to the instance in "
                "control.curve.allowed_keys_file here, or wait until the old incarnation is lost (timeouts.peer_silence_s)"
            )
