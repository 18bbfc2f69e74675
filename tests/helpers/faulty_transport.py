"""Any transport with faults put in on purpose; it keeps the promises of `transport.base`, and later calls drive a late delivery."""

import ctypes
import mmap
import os
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kvbridge.config.transports import TransportSettings
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Peer, Transfer, TransferState, TransferStatus, Transport
from kvbridge.worker import lifecycle

DEATH_EXIT_CODE = 86


class Fate(Enum):
    DONE = "done"
    FAIL = "fail"
    DIE = "die"
    SILENCE = "silence"


@dataclass(slots=True)
class _LateDelivery:
    due_s: float
    peer: Peer
    operations: Operations
    deadline_s: float
    transfer: Transfer | None = None


class FaultySettings(FrozenModel):
    seed: NonNegative = 0
    delay_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Each transfer is reported as done no sooner than so long after its start; its bytes arrive when they do."""
    reorder: bool = False
    """Shuffle the operations of each transfer (by `seed`)."""
    fail_after_operations: NonNegative | None = None
    """Deliver so many operations, counted over the transport's life, then fail every transfer with more, quietly."""
    die_after_operations: NonNegative | None = None
    """Deliver so many operations, counted over the transport's life, then end the process with exit code 86."""
    drop_completion: bool = False
    """Deliver everything and never say so: at its deadline the transfer fails, not quiet, since nobody can know."""
    late_delivery_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    """Report each transfer as failed and not quiet at once, and deliver it so much later, unless closed before."""
    flip_bit_in_operation: Positive | None = None
    """Change one bit of the first byte of this operation (1 is the first, counted over the transport's life) on its way."""
    quiet_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """How long a transfer whose completion was dropped takes from its failure to `not quiet`."""


def install(faults: str) -> None:
    """Put faults (JSON) into every transport that this rank worker's process makes."""
    settings, create = FaultySettings.model_validate_json(faults), lifecycle.create_transport

    def create_faulty(name: str, transports: TransportSettings, *, epoch: int = 0) -> Transport:
        return FaultyTransport(create(name, transports, epoch=epoch), settings)

    lifecycle.create_transport = create_faulty


class FaultyTransport:
    """Wraps `inner`, whose name, endpoints, peers and registrations are its own."""

    def __init__(self, inner: Transport, settings: FaultySettings, *, clock: Clock = monotonic) -> None:
        self._inner = inner
        self._settings = settings
        self._clock = clock
        self._random = np.random.default_rng(settings.seed)
        self._handed_over = 0
        self._late: list[_LateDelivery] = []
        self._scratch: mmap.mmap | None = None
        """Holds the operation of which a bit was flipped, for as long as the inner transport may read it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """The inner transport checks what it is given, so not what a fault withholds."""
        self.deliver_late()
        if self._settings.reorder:
            order = self._random.permutation(len(operations))
            operations = Operations(operations.source[order], operations.destination[order], operations.length[order])
        kept, fate = self._cut(operations)
        kept = self._with_flipped_bit(kept)
        late_s = self._settings.late_delivery_s
        given = operations[:0] if late_s is not None else kept
        transfer = self._inner.submit(peer, given, deadline_s=deadline_s)
        self._handed_over += len(kept)
        if late_s is not None:
            self._late.append(_LateDelivery(self._clock() + late_s, peer, kept, deadline_s))
        return _FaultyTransfer(self, transfer, fate, deadline_s)

    def close(self) -> None:
        """Late deliveries that are still to come never do."""
        self._late.clear()
        self._inner.close()

    def deliver_late(self) -> None:
        """Push late deliveries forward; called by everything that a live transport does."""
        remaining = []
        for delivery in self._late:
            if delivery.transfer is None and self._clock() >= delivery.due_s:
                try:
                    delivery.transfer = self._inner.submit(
                        delivery.peer, delivery.operations, deadline_s=delivery.deadline_s
                    )
                except BridgeError:
                    continue  # its peer has been disconnected or its memory unregistered: nothing is left to be late
            if delivery.transfer is None or not delivery.transfer.poll().state.terminal:
                remaining.append(delivery)
        self._late = remaining

    def _cut(self, operations: Operations) -> tuple[Operations, Fate]:
        settings = self._settings
        for limit, fate in ((settings.die_after_operations, Fate.DIE), (settings.fail_after_operations, Fate.FAIL)):
            if limit is not None and self._handed_over + len(operations) > limit:
                return operations[: max(0, limit - self._handed_over)], fate
        return operations, Fate.SILENCE if settings.drop_completion else Fate.DONE

    def _with_flipped_bit(self, operations: Operations) -> Operations:
        """Let one operation be read from a copy with a flipped bit; its source stays as it is."""
        chosen = (self._settings.flip_bit_in_operation or 0) - 1 - self._handed_over
        if self._settings.flip_bit_in_operation is None or not 0 <= chosen < len(operations):
            return operations
        length_bytes = int(operations.length[chosen])
        self._scratch = mmap.mmap(-1, length_bytes)
        self._scratch.write(ctypes.string_at(int(operations.source[chosen]), length_bytes))
        self._scratch[0] ^= 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))
        self._inner.register([Extent(address=address, length_bytes=length_bytes, label="flipped bit")])
        source = operations.source.copy()
        source[chosen] = address
        return Operations(source, operations.destination, operations.length)


class _FaultyTransfer(Transfer):
    def __init__(self, transport: FaultyTransport, inner: Transfer, fate: Fate, deadline_s: float) -> None:
        self._transport = transport
        self._inner = inner
        self._settings, self._clock = transport._settings, transport._clock
        self._fate = fate
        self._not_before_s = self._clock() + self._settings.delay_s
        self._ends_at_s = self._clock() + deadline_s
        self._error = ""
        self._failed_at_s = 0.0
        self._status = TransferStatus(TransferState.ACTIVE)

    def poll(self) -> TransferStatus:
        self._transport.deliver_late()
        if not self._status.state.terminal:
            self._status = self._next(self._inner.poll())
        return self._status

    def abort(self, reason: str) -> None:
        self._fail(f"aborted: {reason}")
        self._inner.abort(reason)

    def _next(self, inner: TransferStatus) -> TransferStatus:
        if self._settings.late_delivery_s is not None:
            return TransferStatus(TransferState.FAILED_NOT_QUIET, "injected: reported as failed, to be delivered later")
        if inner.state is not TransferState.DONE:
            return replace(inner, unconfirmed=(slice(None),))  # it was given others, or in another order
        match self._fate:
            case Fate.DIE:
                os._exit(DEATH_EXIT_CODE)
            case Fate.FAIL:
                limit = self._settings.fail_after_operations
                return TransferStatus(TransferState.FAILED_QUIET, f"injected: failed after {limit} operations")
        # All is delivered, and the caller does not know it yet.
        now_s, silent = self._clock(), self._fate is Fate.SILENCE
        if not self._error and not silent and now_s >= self._not_before_s:
            return TransferStatus(TransferState.DONE)
        if now_s >= self._ends_at_s:
            self._fail("injected: no completion by the deadline")
        if self._error and not (silent and now_s < self._failed_at_s + self._settings.quiet_timeout_s):
            state = TransferState.FAILED_NOT_QUIET if silent else TransferState.FAILED_QUIET
            return TransferStatus(state, self._error)
        return self._status

    def _fail(self, reason: str) -> None:
        if not self._error:
            self._error, self._failed_at_s = reason, self._clock()
