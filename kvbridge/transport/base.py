"""The promise of every transport (`Transport`), and the common work of all backends (`Backend`).

The promise. Neither transfer library stops a transfer that it has reported as failed. A backend therefore says one of
two things of a failure: `FAILED_QUIET` (no operation of this transfer reads its source any more, nor sends anything) or
`FAILED_NOT_QUIET` (some still may). After the second the only cure is `close()` of the whole transport, and pages
on both sides must not be used again before that. A transfer is never simply dropped: it is polled until it is terminal.

Quiet is the writer's half. Bytes that were sent and never confirmed may lie in buffers on the way, the receiver's own kernel
included, and arrive at any time (`TransferStatus.in_transit`). The receiver's half is to close the transport that they would
arrive through: peers reach the next one by another endpoint, of a later *epoch*, and `revoked` says when no peer can use an
earlier one any more.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Generic, Protocol, TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from kvbridge.core.errors import ConfigError, InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.extents import Extents, Stretch
from kvbridge.transport.threads import Call

log = structlog.get_logger(__name__)


class Endpoint(FrozenModel):
    """How peers reach a transport. `data` is opaque to all but the backend; at most 1 MiB."""

    transport: str
    data: bytes


class TransferState(Enum):
    """Where a transfer stands."""

    ACTIVE = "active"
    DONE = "done"
    """Every byte is in the destination's memory."""
    FAILED_QUIET = "failed_quiet"
    FAILED_NOT_QUIET = "failed_not_quiet"

    @property
    def terminal(self) -> bool:
        """Whether the state is final."""
        return self is not TransferState.ACTIVE


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """A transfer's state and, after a failure, its first cause in words."""

    state: TransferState
    error: str = ""
    in_transit: bool = False
    """After a failure: bytes were sent whose arrival was never confirmed, so they may still arrive."""
    unconfirmed: tuple[slice, ...] = (slice(None),)
    """After a failure: the submitted operations whose arrival was not confirmed, started or not. A backend that cannot tell says
    all of them."""


class Transfer(ABC):
    """Operations on their way to one peer. Used by the thread that submitted it, and by no other."""

    @abstractmethod
    def poll(self) -> TransferStatus:
        """Push the transfer forward and say where it stands. Never blocks for longer than about a millisecond.

        After the first failed operation nothing further is submitted, and the state stays ACTIVE until every operation
        is terminal (FAILED_QUIET) or the quiet deadline has passed (FAILED_NOT_QUIET). Terminal states do not change.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Submit nothing further; the transfer then ends as after a failure. Harmless on a terminal transfer."""


class Peer:
    """The caller's handle of a connected peer. The transport, not the handle, keeps the peer's memory mapped."""

    def __init__(self, label: str = "") -> None:
        self._label = label

    def __repr__(self) -> str:
        return f"<{self._label or 'Peer'}>"


class Transport(ABC):
    """One backend's agent in one process. Used by one thread, after and before others have made and closed it.

    Errors: TransportError (and its RegistrationError) for what the library or the peer did, InvalidInputError for what
    the caller did. A library's own exceptions never pass.
    """

    name: ClassVar[str]

    @property
    @abstractmethod
    def max_operation_bytes(self) -> int:
        """Longer operations must be cut before `submit`."""

    @property
    def operation_cost_bytes(self) -> int:
        """Bytes that take as long as one more operation: up to so many dead bytes are sent along to save one."""
        return 0

    @abstractmethod
    def register(self, memory: Sequence[Extent]) -> None:
        """Make memory usable as a source and as a destination. Ranges must not overlap registered ones."""

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """How to reach this transport. Covers the memory registered so far, so ask again after `register`."""

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        """Get ready to write into the memory of the transport behind `endpoint`; bounded by the connect timeout.

        This call, and polling the one that it returns, raise TransportError when the peer cannot be reached or is not on
        the required host, InvalidInputError for our own endpoint. Transfers to other peers go on meanwhile. Connecting again to a
        newer incarnation of the same peer is a new connection; disconnect the old one first.
        """

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer. No transfer to it is active."""

    @abstractmethod
    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """Start to write; `deadline_s` is seconds from now until the transfer counts as failed.

        Raises InvalidInputError, with nothing submitted, when a range is not within the memory that this process has registered, or
        that the peer has announced. The arrays are not copied and must stay unchanged until the transfer is terminal.
        """

    @abstractmethod
    def close(self) -> None:
        """Tear the agent down. Afterwards nothing of it moves a byte, whatever state its transfers were in.

        Nor does anything arrive through it any more, except by peers that need no help of ours: see `revoked`.
        """

    def revoked(self, before_epoch: int) -> bool:
        """Whether no peer can write any more by means of an endpoint of an epoch earlier than `before_epoch`.

        The transports that gave out those endpoints have been closed, in this process or by the end of an earlier one.
        A backend whose bytes arrive through its agent needs nothing else.
        Device memory that peers may have open is not freed before this is true, unless by the end of its process.
        """
        del before_epoch
        return True


class KnownPeer(Protocol):
    """A connected peer: its name in messages, and its memory as announced."""

    label: str
    extents: Extents


PeerT = TypeVar("PeerT", bound=KnownPeer)
ContentT = TypeVar("ContentT", bound=BaseModel)


class Backend(Transport, Generic[PeerT]):
    """An agent with its memory and its peers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._memory = Extents("this process")
        self._peers: dict[Peer, PeerT] = {}
        self._transfers: weakref.WeakKeyDictionary[Transfer, Peer] = weakref.WeakKeyDictionary()
        """Transfers that somebody still holds."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._memory!r}, {len(self._peers)} peers>"

    def register(self, memory: Sequence[Extent]) -> None:
        self._require_open()
        for part in memory:
            reason = self._out_of_reach(part)
            if reason:
                raise RegistrationError(f"cannot register {part.label or 'memory'} at {part.address:#x}: {reason}")
        fresh = (Stretch(part.address, part.length_bytes, self._place(part)) for part in memory)
        joined = Extents("this process", [*self._memory.stretches, *fresh])
        self._register(memory)
        self._memory = joined

    def disconnect(self, peer: Peer) -> None:
        """Transfers that are still active are aborted; their owner keeps polling them."""
        self._known(peer)
        for transfer, to in list(self._transfers.items()):
            if to is peer:
                transfer.abort("the peer was disconnected")
        del self._peers[peer]

    @abstractmethod
    def _require_open(self) -> None:
        """Raise TransportError after `close`."""

    @abstractmethod
    def _out_of_reach(self, part: Extent) -> str:
        """Why some memory cannot be registered, empty when it can."""

    @abstractmethod
    def _register(self, memory: Sequence[Extent]) -> None:
        """Register memory that overlaps none: all of it, or raise a TransportError."""

    def _place(self, part: Extent) -> int:
        """`Stretch.place` of some memory of this process."""
        del part
        return 0

    def _take(self, known: PeerT) -> Peer:
        """Return the handle of a peer that has been connected."""
        self._require_open()
        peer = Peer(known.label)
        self._peers[peer] = known
        return peer

    def _checked(self, peer: Peer, operations: Operations) -> PeerT:
        """Return what is known of a peer to which operations are to go. Raises InvalidInputError, TransportError."""
        self._require_open()
        known = self._known(peer)
        self._memory.require(operations.source, operations.length)
        known.extents.require(operations.destination, operations.length)
        longest = int(operations.length.max(initial=0))
        if longest > self.max_operation_bytes:
            raise InvalidInputError(
                f"an operation of {longest} bytes is longer than max_operation_bytes ({self.max_operation_bytes}); cut it first"
            )
        return known

    def _known(self, peer: Peer) -> PeerT:
        known = self._peers.get(peer)
        if known is None:
            raise InvalidInputError(f"{peer!r} is not connected to this {self.name} transport; connect it first")
        return known


def labels(memory: Sequence[Extent]) -> str:
    """Name some memory in messages."""
    return ", ".join(sorted({part.label or "unnamed" for part in memory}))


def read_endpoint(endpoint: Endpoint, transport: str, content: type[ContentT]) -> ContentT:
    """Return what a peer says of itself. Raises TransportError when it is not of `transport`, or unreadable."""
    if endpoint.transport != transport:
        raise TransportError(f"an endpoint of transport '{endpoint.transport}' was given to {transport}")
    try:
        return content.model_validate_json(endpoint.data, extra="ignore")
    except ValidationError as error:
        raise TransportError(
            f"a peer's {transport} endpoint cannot be read: {error.error_count()} errors, the first: "
            f"{error.errors()[0]['msg']}; both sides must run the same release"
        ) from error


def set_environment(read: dict[str, str], wanted: Mapping[str, str], *, library: str, settings: str) -> None:
    """Set the variables that a library is about to read, once a process, and note them in `read`.

    `settings` names the configuration keys behind them. Raises ConfigError when the library was loaded with other values.
    """
    if not read:
        for name, value in wanted.items():
            if os.environ.get(name, value) != value:
                log.warning("environment_replaced", name=name, was=os.environ[name], now=value, settings=settings)
        os.environ.update(wanted)
        read.update(wanted)
    elif read != wanted:
        changed = sorted(name for name in wanted.keys() | read.keys() if wanted.get(name) != read.get(name))
        raise ConfigError(
            f"{library} reads {', '.join(changed)} once a process and was loaded with other values; give every transport of a "
            f"process that uses it the same {settings}"
        )
