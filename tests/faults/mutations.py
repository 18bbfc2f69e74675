"""Daemons that are wrong on purpose: proof that the canaries would see it.

Owns: the two mistakes, as code that runs in the daemon's process before it starts. Must not know: the tests. The product
has no hook for this: the process is started with `python -c` instead of `python -m kvbridge`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from subprocess import Popen

from kvbridge.testbed.cluster import DaemonProcess

FREE_BY_TIMER = """
from kvbridge.pool.accounts.book import PageBook, PageState

def quarantine(book, owner, reason):
    if book.state(owner) is PageState.LEASED:
        book.move(owner, PageState.LEASED, PageState.HELD)
    if book.state(owner) is PageState.HELD:
        book.free(owner)

PageBook.quarantine = quarantine
"""
"""Pages that nobody has proved to be quiet are given to the next room instead of being quarantined."""

BELIEVE_QUIET = """
from kvbridge.transport.base import TransferState
from kvbridge.transport import faulty

class Believer:
    FAILED_NOT_QUIET = TransferState.FAILED_QUIET

    def __getattr__(self, name):
        return getattr(TransferState, name)

faulty.TransferState = Believer()
"""
"""A transport that may still write is taken for one that does not (in the rank workers)."""

_AS_DAEMON = "from kvbridge.cli.main import main; main()"
_AS_WORKER = """
import os, sys
from kvbridge.worker.process import main
code = main()
sys.stderr.flush()
os._exit(code)
"""
_WORKER_TOO = """
from types import SimpleNamespace
from kvbridge.daemon import supervisor
supervisor.sys = SimpleNamespace(executable={script!r})
"""


class MutatedDaemon(DaemonProcess):
    """A daemon process with a mistake in it, or in its rank workers."""

    daemon_code = ""
    worker_code = ""

    def launch(
        self, command: Sequence[str], *, piped: bool = False, environment: Mapping[str, str] | None = None
    ) -> Popen[bytes]:
        """Start it through `-c`."""
        assert list(command[1:3]) == ["-m", "kvbridge"]
        code = self.daemon_code
        if self.worker_code:
            code += _WORKER_TOO.format(script=str(self._worker_script()))
        return super().launch([command[0], "-c", code + _AS_DAEMON, *command[3:]], piped=piped, environment=environment)

    def _worker_script(self) -> str:
        """A program that is called as the interpreter would be, `-m module` and arguments, and starts a mutated worker."""
        source, script = self.folder / "worker.py", self.folder / "worker.sh"
        source.write_text(self.worker_code + _AS_WORKER)
        run = f"exec(open({str(source)!r}).read())"
        script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "{run}" "$@"\n')
        script.chmod(0o700)
        return str(script)
