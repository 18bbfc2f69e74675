"""Daemons and rank workers that tests change before they start. The product has no hook for this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from subprocess import Popen

from kvbridge.cli.local_cluster import DaemonProcess
from tests.helpers.zygote import FORKED

_AS_DAEMON = "from kvbridge.cli.main import main; main()"
_AS_WORKER = """
import os, sys
from kvbridge.worker.process import main
code = main()
sys.stderr.flush()
os._exit(code)
"""
_WORKER_TOO = """
import sys
from kvbridge import processes
processes.module_command = lambda module, *arguments: [sys.executable, "-c", {code!r}, *arguments]
"""


class MutatedDaemon(DaemonProcess):
    """A daemon process that runs code of a test first, or whose rank workers do."""

    daemon_code = ""
    worker_code = ""

    def launch(
        self, command: Sequence[str], *, piped: bool = False, environment: Mapping[str, str] | None = None
    ) -> Popen[bytes]:
        """Start it through `-c`."""
        assert list(command[1:4]) == ["-P", "-m", "kvbridge"]
        code = FORKED + self.daemon_code
        if self.worker_code:
            code += _WORKER_TOO.format(code=FORKED + self.worker_code + _AS_WORKER)
        return super().launch([command[0], "-c", code + _AS_DAEMON, *command[4:]], piped=piped, environment=environment)


def mutated(daemon: DaemonProcess, *, daemon_code: str = "", worker_code: str = "") -> DaemonProcess:
    """The same daemon, changed; or itself when there is no code."""
    if not daemon_code and not worker_code:
        return daemon
    changed = MutatedDaemon(daemon.role, daemon.name, daemon.folder, daemon.config, ends_with_us=True)
    changed.arguments = daemon.arguments
    changed.daemon_code, changed.worker_code = daemon_code, worker_code
    return changed
