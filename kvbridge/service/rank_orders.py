"""One order of the node: from the section to the transfers that move it, to how it ended.

Owns: an order's facts, planning and submitting it, asking after its transfers. Must not know: the link to the node,
which orders run when, how a transport is rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import Amounts, Operations, add_amounts
from kvbridge.core.plan.planner import plan
from kvbridge.core.wire.messages import OpenRoom, Send
from kvbridge.service.rank_peers import ConnectedPeer, Target
from kvbridge.service.rooms import REASON_CHARS
from kvbridge.transport.base import Transfer, TransferState, Transport

log = structlog.get_logger(__name__)

RoomKey = tuple[int, int]
"""A room and its generation."""


@dataclass(frozen=True, eq=False)
class OpenedRoom:
    """The two ends of a room."""

    opening: OpenRoom
    source: Tables
    destination: Tables


@dataclass(eq=False)
class Order:
    """One `Send`. Reported once, when nothing of it is in flight."""

    request: Send
    received_s: float
    peer: ConnectedPeer | None = None
    """Where it goes, once it has been started."""
    amounts: Amounts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    transfers: list[tuple[Transport, Transfer]] = field(default_factory=list)
    error_code: str = ""
    error: str = ""

    @property
    def key(self) -> RoomKey:
        """The attempt that it belongs to."""
        return self.request.room, self.request.generation

    def fail(self, code: str, reason: str) -> None:
        """Keep the first cause and submit nothing further; what is in flight ends as after a failure."""
        if not self.error_code:
            self.error_code, self.error = code, reason[:REASON_CHARS]
        for _, transfer in self.transfers:
            transfer.abort(reason)

    def start(self, room: OpenedRoom, peer: ConnectedPeer, *, timeout_s: float, clock: Clock) -> None:
        """Plan and submit to every rank of the peer. A failure of either is the order's, and nobody else's."""
        self.peer = peer
        begun_s = clock()
        try:
            planned = self._plan(room, peer)
            self.seconds["plan"] = clock() - begun_s
            for target, operations in planned:
                transfer = target.transport.submit(target.peer, operations, deadline_s=timeout_s)
                self.transfers.append((target.transport, transfer))
        except BridgeError as error:
            self.fail(error.code, str(error))
        self.seconds["first_byte"] = clock() - self.received_s

    def _plan(self, room: OpenedRoom, peer: ConnectedPeer) -> list[tuple[Target, Operations]]:
        """Plan for every rank before anything is submitted, so that bad tables move nothing at all."""
        planned = []
        try:
            for target in peer.targets:
                part = plan(
                    target.pairing,
                    self.request.section,
                    room.source,
                    room.destination,
                    max_operation_bytes=target.transport.capabilities.max_operation_bytes,
                )
                self.amounts = add_amounts(self.amounts, part.amounts)
                if len(part.operations):
                    planned.append((target, part.operations))
        except BridgeError:
            raise
        except Exception as error:  # planning is pure: one room's defect must not end the rank's other rooms
            log.exception("planning_failed", room=self.request.room, order=self.request.order)
            raise BridgeError(f"planning failed with {type(error).__name__}: {error}; please report it") from error
        return planned

    def poll(self) -> tuple[bool, set[Transport]]:
        """Push the transfers forward.

        Returns whether all of them are terminal, and the transports that did not become quiet after a failure.
        """
        ended = True
        loud: set[Transport] = set()
        for transport, transfer in self.transfers:
            status = transfer.poll()
            if not status.state.terminal:
                ended = False
            elif status.state is not TransferState.DONE:
                self.fail(TransportError.code, f"{transport.name}: {status.error}")
                if status.state is TransferState.FAILED_NOT_QUIET:
                    loud.add(transport)
        return ended, loud

    def lose(self, transport: Transport) -> bool:
        """Forget the transfers of a transport that has been torn down; whether there were any."""
        kept = [(used, transfer) for used, transfer in self.transfers if used is not transport]
        if len(kept) == len(self.transfers):
            return False
        self.transfers = kept
        self.fail(TransportError.code, f"{transport.name}: torn down because a transfer would not become quiet")
        return True
