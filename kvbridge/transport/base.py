"""The promise of every transport (`Transport`), the common work of all backends (`Backend`), and their memory (`Extents`).

Neither transfer library stops a transfer that it has reported as failed. A backend therefore says one of two things of a failure:
`FAILED_QUIET` (no operation of this transfer reads its source any more, nor sends anything) or `FAILED_NOT_QUIET` (some still may).
After the second the only cure is `close()` of the whole transport, and pages on both sides must not be used again before that. A
transfer is never simply dropped: it is polled until it is terminal.

Quiet is the writer's half. Bytes that were sent and never confirmed may lie in buffers on the way, the receiver's own kernel
included, and arrive at any time (`TransferStatus.in_transit`). The receiver's half is to close the transport by which these bytes
would arrive. Peers reach the next transport by another endpoint, of a later *epoch*. `revoked` says when no peer can use an earlier
endpoint any more.
"""

from __future__ import annotations

import itertools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import BaseModel, ValidationError

from kvbridge.core.errors import ConfigError, InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.plan.operations import AddressArray, Operations
from kvbridge.core.process import Clock
from kvbridge.pool.memory.layout import Extent
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

        After the first failed operation nothing further is submitted, and the state stays ACTIVE until every operation is terminal
        (FAILED_QUIET) or the quiet deadline has passed (FAILED_NOT_QUIET). Terminal states do not change.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Submit nothing further; the transfer ends as after a failure. Harmless on a terminal transfer."""


class Peer:
    """The caller's handle of a connected peer. The transport, not the handle, keeps the peer's memory mapped."""

    def __init__(self, label: str = "") -> None:
        self._label = label

    def __repr__(self) -> str:
        return f"<{self._label or 'Peer'}>"


class Transport(ABC):
    """One backend's agent in one process. One thread uses it; other threads may make and close it.

    Errors: TransportError (and its RegistrationError) for what the library or the peer did, InvalidInputError for what the caller
    did. A library's own exceptions never pass.
    """

    name: ClassVar[str]
    max_operation_bytes: int
    """Longer operations must be cut before `submit`."""
    operation_cost_bytes: int = 0
    """Bytes that take as long as one more operation: up to so many dead bytes are sent to save an operation."""

    @abstractmethod
    def register(self, memory: Sequence[Extent]) -> None:
        """Make memory usable as a source and as a destination. Ranges must not overlap registered ones."""

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """Return how peers reach this transport and the memory registered so far. Ask again after `register`."""

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        """Get ready to write into the memory of the transport behind `endpoint`; bounded by the connect timeout.

        `connect` and the poll of its call raise TransportError when the peer cannot be reached or is not on the required host,
        InvalidInputError for our own endpoint. Transfers to other peers go on meanwhile. A newer incarnation of a peer is another
        peer; disconnect the old one first.
        """

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer. No transfer to it is active."""

    @abstractmethod
    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """Start to write; a transfer that takes longer than `deadline_s` fails.

        Raises InvalidInputError, with nothing submitted, for a range outside of the memory that this process has registered or that
        the peer has announced. The arrays are not copied and must stay unchanged until the transfer is terminal.
        """

    @abstractmethod
    def close(self) -> None:
        """Tear the agent down. Afterwards it moves no byte, whatever state its transfers were in.

        Nothing arrives through it any more either, except from peers that need no help of this process: see `revoked`.
        """

    def revoked(self, before_epoch: int) -> bool:
        """Whether no peer can write any more by an endpoint of an epoch earlier than `before_epoch`.

        The transports that gave out those endpoints have been closed, in this process or by the end of an earlier process. A
        backend whose bytes arrive through its agent needs nothing else. Device memory that peers may have open is not freed before
        this is true, unless by the end of its process.
        """
        del before_epoch
        return True


class Stretch(NamedTuple):
    """One registration: `length_bytes` at `address` in its owner's process."""

    address: int
    length_bytes: int
    place: int = 0
    """A number by which the backend knows the kind of memory, or the device."""
    shift: int = 0
    """The same memory is at `address + shift` in this process."""


class Extents:
    """Memory of one owner by the owner's addresses: stretches that do not overlap; never changed.

    Ranges are checked here because no library can be trusted with it: Mooncake accepts unregistered local memory on TCP and loses a
    connection for each remote address that it rejects; NIXL checks on the initiating side only. A range that straddles two
    stretches is refused even if they touch, since they are two registrations.
    """

    def __init__(self, whose: str, stretches: Iterable[Stretch | tuple[int, int]] = ()) -> None:
        """`whose` names the owner in errors ("this process"). Raises InvalidInputError when two stretches overlap."""
        self._whose = whose
        self.stretches = tuple(sorted(Stretch(*each) for each in stretches))
        """By ascending address."""
        for left, right in itertools.pairwise(self.stretches):
            if left.address + left.length_bytes > right.address:
                raise InvalidInputError(
                    f"memory of {whose}: {_range(*right[:2])} overlaps {_range(*left[:2])}, "
                    "which is registered already or in the same call; register each byte once"
                )
        self._starts = np.array([each.address for each in self.stretches], dtype=np.uint64)
        self._stops = np.array([each.address + each.length_bytes for each in self.stretches], dtype=np.uint64)
        self._places = np.array([each.place for each in self.stretches], dtype=np.int64)
        # A negative shift wraps, and the sum wraps back.
        self._shifts = np.array([each.shift for each in self.stretches], dtype=np.int64).astype(np.uint64)
        self.places = frozenset(self._places.tolist())
        """Every place with some of the memory."""

    def __len__(self) -> int:
        return len(self.stretches)

    def __repr__(self) -> str:
        return f"<Extents of {self._whose}: {len(self)} of {sum(each.length_bytes for each in self.stretches)} bytes>"

    def here(self, addresses: AddressArray) -> AddressArray:
        """Return the addresses in this process of bytes that have been checked."""
        if not len(addresses):
            return addresses
        alike = (self._shifts == self._shifts[0]).all()
        return addresses + (self._shifts[0] if alike else self._shifts[self._find(addresses)])

    def place(self, addresses: AddressArray) -> npt.NDArray[np.int64]:
        """Return the place of each address; all of them have been checked."""
        return self._places[self._find(addresses)]

    def places_of(self, addresses: AddressArray) -> frozenset[int]:
        """Return all places of some addresses that have been checked."""
        if len(self.places) < 2 or not len(addresses):
            return self.places
        return frozenset(np.unique(self.place(addresses)).tolist())

    def require(self, addresses: AddressArray, lengths: AddressArray) -> None:
        """Raise InvalidInputError, naming the first offender, unless each range is not empty and within one stretch."""
        if not len(addresses) or self._within_one(addresses, lengths):
            return
        inside = np.zeros(len(addresses), dtype=np.bool_)
        if len(self):
            found = self._find(addresses)
            stops = self._stops[found]  # the last stretch's stop for an address before the first one; masked below
            inside = (found >= 0) & (addresses < stops) & (lengths > 0) & (lengths <= stops - addresses)
        if not inside.all():
            first = int(inside.argmin())
            raise InvalidInputError(
                f"{int((~inside).sum())} of {len(addresses)} operations leave the registered memory of {self._whose}; "
                f"the first is operation {first}, {_range(int(addresses[first]), int(lengths[first]))}. "
                "Nothing was submitted"
            )

    def _find(self, addresses: AddressArray) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def _within_one(self, addresses: AddressArray, lengths: AddressArray) -> bool:
        """Return whether all ranges together lie in one stretch, which is the usual case and quicker to see."""
        if not len(self) or not lengths.all():
            return False
        found = int(np.searchsorted(self._starts, addresses.min(), side="right")) - 1
        if found < 0 or addresses.max() >= self._stops[found]:
            return False
        return bool((lengths <= self._stops[found] - addresses).all())


def _range(address: int, length: int) -> str:
    return f"{length} bytes at {address:#x}"


class KnownPeer(Protocol):
    """A connected peer: its name in messages, and its memory as announced."""

    label: str
    extents: Extents


PeerT = TypeVar("PeerT", bound=KnownPeer)
ContentT = TypeVar("ContentT", bound=BaseModel)


class Backend(Transport, Generic[PeerT]):
    """An agent with its memory and its peers."""

    def __init__(self, clock: Clock, *, max_operation_bytes: int) -> None:
        self.max_operation_bytes = max_operation_bytes
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
        """Return the handle of a peer that is now connected."""
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
    """Return a peer's description of itself. Raises TransportError when it is of another transport, or unreadable."""
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
