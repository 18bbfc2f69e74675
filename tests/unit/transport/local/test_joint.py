"""Several transfers as one: done together, failed together, quiet only when all are."""

from __future__ import annotations

from kvbridge.transport.base import Transfer, TransferState, TransferStatus
from kvbridge.transport.local.ways import JointTransfer

ACTIVE, DONE = TransferStatus(TransferState.ACTIVE), TransferStatus(TransferState.DONE)
QUIET = TransferStatus(TransferState.FAILED_QUIET, "the cause", in_transit=True)
NOT_QUIET = TransferStatus(TransferState.FAILED_NOT_QUIET, "a consequence")


class Part(Transfer):
    """Says what it is told to say; ends quietly after an abort when it is `obedient`."""

    def __init__(self, *, obedient: bool = False) -> None:
        self.status = ACTIVE
        self.reasons: list[str] = []
        self.obedient = obedient

    def poll(self) -> TransferStatus:
        return self.status

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.obedient and self.status is ACTIVE:
            self.status = TransferStatus(TransferState.FAILED_QUIET, f"aborted: {reason}")


def test_one_failure_aborts_the_others_and_gives_the_cause() -> None:
    parts = [Part(), Part(obedient=True)]
    whole = JointTransfer(parts)
    parts[0].status = QUIET
    assert whole.poll() == TransferStatus(TransferState.FAILED_QUIET, "the cause", in_transit=True)
    assert "the cause" in parts[1].reasons[0]


def test_active_until_the_last_part_has_ended_and_as_loud_as_the_loudest() -> None:
    parts = [Part(), Part(), Part()]
    whole = JointTransfer(parts)
    parts[0].status = QUIET
    assert whole.poll() == ACTIVE
    parts[1].status = DONE
    assert whole.poll() == ACTIVE
    assert len(parts[2].reasons) == 1
    parts[2].status = NOT_QUIET
    status = whole.poll()
    assert status == TransferStatus(TransferState.FAILED_NOT_QUIET, "the cause", in_transit=True)
    parts[0].status = DONE
    assert whole.poll() is status
