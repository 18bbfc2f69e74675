"""What a transport backend is: four verbs and a promise about silence.

The promise. Neither transfer library stops a transfer that it has reported as failed. So a backend says one of two
things of a failure: `FAILED_QUIET` (no operation of this transfer reads its source any more, nor sends anything) or
`FAILED_NOT_QUIET` (some still may). After the second the only cure is `close()` of the whole transport, and pages
on both sides must not be used again before that. A transfer is never simply dropped: it is polled until it is terminal.

Quiet is the writer's half. What was sent and never confirmed may lie in buffers on the way, the receiver's own kernel
included, and arrive when nobody expects it (`TransferStatus.in_transit`). The receiver's half is to close the transport
that it would arrive through: peers reach the next one by another endpoint, of a later *epoch*, and `revoked` says when
none of them can use an earlier one any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from kvbridge.core.ids import FrozenModel
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.memory.extent import Extent


class Endpoint(FrozenModel):
    """How peers reach a transport. `data` is the backend's own and opaque to everybody else; at most 1 MiB."""

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
    """After a failure: something was sent whose arrival was never confirmed, so it may still arrive."""
    unconfirmed: tuple[slice, ...] = (slice(None),)
    """After a failure: of the submitted operations, those whose arrival was not confirmed, whether they were started or not. A
    backend that cannot tell says all of them."""


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
    """A connected remote transport; made by `Transport.connect`. The transport keeps what it knows of the peer, not this handle."""

    def __init__(self, label: str = "") -> None:
        self._label = label

    def __repr__(self) -> str:
        return f"<{self._label or 'Peer'}>"


class Connection(ABC):
    """A peer that is being connected: polled until there is one. Used by the thread that uses the transport."""

    @abstractmethod
    def poll(self) -> Peer | None:
        """Return the peer once it is connected, and raise what made that impossible; each only once. Never blocks."""

    @abstractmethod
    def cancel(self) -> None:
        """Give it up, and undo what has been done. Harmless when it has ended."""


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
        """How many bytes take as long as one more operation does: up to so many dead ones are sent along to save it."""
        return 0

    @abstractmethod
    def register(self, memory: Sequence[Extent]) -> None:
        """Make memory usable as a source and as a destination. Ranges must not overlap registered ones."""

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """How to reach this transport. Covers the memory registered so far, so ask again after `register`."""

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> Connection:
        """Get ready to write into the memory of the transport behind `endpoint`; bounded by the connect timeout.

        Polling the connection returns the peer, or raises TransportError when it cannot be reached or is not on the
        required host, InvalidInputError for our own endpoint. Transfers to other peers go on meanwhile: whatever waits for the
        peer waits on another thread (`calls`). Connecting again to a newer incarnation of the same peer is a new
        connection; the old one is to be disconnected first.
        """

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forget a peer. No transfer to it is active."""

    @abstractmethod
    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """Start to write; `deadline_s` is seconds from now until the transfer counts as failed.

        Every source range is checked against the registered memory first (InvalidInputError, nothing submitted);
        the destination has been checked by the planner against the peer's manifest. The arrays are not copied and
        must stay unchanged until the transfer is terminal.
        """

    @abstractmethod
    def close(self) -> None:
        """Tear the agent down. Afterwards nothing of it moves a byte, whatever state its transfers were in.

        Nor does anything arrive through it any more, except by peers that need no help of ours: see `revoked`.
        """

    def revoked(self, before_epoch: int) -> bool:
        """Whether no peer can write any more by means of an endpoint of an epoch earlier than `before_epoch`.

        The transports that gave out those endpoints have been closed, in this process or by the end of an earlier one.
        For a backend whose bytes arrive through its agent nothing else is needed.
        Device memory that peers may have open is not freed before this is true, unless by the end of its process.
        """
        del before_epoch
        return True
