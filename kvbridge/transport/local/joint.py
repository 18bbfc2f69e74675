"""Transfers that are one to the caller: what one submission became when its parts go different ways.

Owns: the state of the whole. Must not know: what the parts are.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge.transport.base import Transfer, TransferState, TransferStatus


class JointTransfer(Transfer):
    """Done when every part is. The first part that fails aborts the others, and gives the cause."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = tuple(parts)
        self._error = ""
        self._status = TransferStatus(TransferState.ACTIVE)

    def __repr__(self) -> str:
        return f"<JointTransfer: {self._status.state.value}, {self._parts!r}>"

    def poll(self) -> TransferStatus:
        """See `Transfer.poll`. Not quiet as soon as one part is not, once all have ended."""
        if self._status.state.terminal:
            return self._status
        statuses = [part.poll() for part in self._parts]
        failed = [status for status in statuses if status.state.terminal and status.state is not TransferState.DONE]
        if failed and not self._error:
            self._error = failed[0].error
            self.abort(f"another part of the transfer failed: {self._error}")
            statuses = [part.poll() for part in self._parts]
        if all(status.state.terminal for status in statuses):
            self._status = self._joined(statuses)
        return self._status

    def abort(self, reason: str) -> None:
        """See `Transfer.abort`."""
        for part in self._parts:
            part.abort(reason)

    def _joined(self, statuses: Sequence[TransferStatus]) -> TransferStatus:
        states = {status.state for status in statuses}
        in_transit = any(status.in_transit for status in statuses)
        for state in (TransferState.FAILED_NOT_QUIET, TransferState.FAILED_QUIET):
            if state in states:
                return TransferStatus(state, self._error, in_transit)
        return TransferStatus(TransferState.DONE)
