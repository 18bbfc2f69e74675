"""Daemons of which nothing can be seen: what metrics, logs and status page cost is measured against them.

Owns: the code that such a daemon runs first (`mutated_daemon`). Must not know: what is measured.

No fact is made or read, nothing is counted, no request has an id, only errors are logged. What only serves telemetry
and is woven into the work all the same, such as taking the time, stays.
"""

from __future__ import annotations

from kvbridge.cli.local_cluster import DaemonProcess
from tests.helpers.mutated_daemon import mutated

CODE = """
from kvbridge.http.middleware import Observed
from kvbridge.telemetry import events, stream
from kvbridge.telemetry.registry import Metrics

def nothing(*_given, **_named):
    pass

def kinds(kind):
    return [kind, *(each for below in kind.__subclasses__() for each in kinds(below))]

for kind in kinds(events.Fact):
    kind.__init__ = nothing
stream.EventStream.emit = nothing
for name in ("count", "assign", "observe", "answered", "transferred"):
    setattr(Metrics, name, nothing)
Observed.__call__ = lambda self, *given: self._app(*given)
"""


def blind(daemon: DaemonProcess) -> DaemonProcess:
    """The same daemon, seeing nothing of what it does."""
    daemon.config["telemetry"] = {"log_level": "error"}
    return mutated(daemon, daemon_code=CODE)
