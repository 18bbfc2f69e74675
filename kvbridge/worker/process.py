"""A rank worker as a process of its own: `python -m kvbridge.worker.process`. Started by its node's supervisor only.

It ends when the node says so, when the connection to the node ends, or with the node's process. It ignores the signals that end
services, before any slow import: systemd sends SIGTERM to every process of a unit, and a shell to a whole group, and rooms could
not be drained if workers obeyed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from kvbridge.core.process import UNUSED_BY_DAEMONS, importing


def main(arguments: list[str] | None = None) -> int:
    """Serve one rank until the node says Shutdown. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    given = _parse(arguments)
    with importing(*UNUSED_BY_DAEMONS):
        from kvbridge.processes import end_with_parent  # noqa: PLC0415 - imports what takes a while

        end_with_parent(given.parent, signal.SIGKILL)  # a worker must not write to peers' memory after its node's end
        from kvbridge.worker.lifecycle import serve  # noqa: PLC0415 - takes a while, in which no signal may end us
    return serve(given)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvbridge rank worker")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--setup-timeout-s", type=float, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-descriptor", type=int, default=2, help="where the log is written to; 2: standard error")
    for name in ("--role", "--instance", "--node"):
        parser.add_argument(name, required=True, help="for the log")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # Both transfer libraries run threads that do not survive the interpreter's orderly end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
