"""Rank workers whose copies to the host wait for a test: while a file is there, none that has been made is said to be done."""

from __future__ import annotations

from kvbridge.cli.local_cluster import DaemonProcess
from tests.helpers.mutated_daemon import mutated

_CODE = """
from pathlib import Path
from kvbridge.worker.copies import BackupCopier

done = BackupCopier.done
BackupCopier.done = lambda copier, ticket: not Path({file!r}).exists() and done(copier, ticket)
"""


def with_held_copies(daemon: DaemonProcess) -> DaemonProcess:
    """The same daemon, whose rank workers' copies `hold` and `let_go` end; bootstrap as it is."""
    if daemon.role == "bootstrap":
        return daemon
    return mutated(daemon, worker_code=_CODE.format(file=str(daemon.folder / "hold")))


def hold(daemon: DaemonProcess) -> None:
    """No copy of this daemon's rank workers ends from now on."""
    (daemon.folder / "hold").touch()


def let_go(daemon: DaemonProcess) -> None:
    """Copies end again, those that have been held first."""
    (daemon.folder / "hold").unlink(missing_ok=True)
