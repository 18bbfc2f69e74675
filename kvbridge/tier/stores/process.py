"""The process that uses a store for its node: `python -m kvbridge.tier.stores.process`. Started by `client` only.

Owns: how long the process lives: no longer than its node, and than their connection. Must not know: what it serves.

A store's calls may take a minute and more, and go on moving bytes when they have been given up. So they happen here: the end of
this process is the proof that none of its pages is read or written any more.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 4
"""The node had ended before this process could be bound to it."""


def main(arguments: list[str] | None = None) -> int:
    """Serve until the connection ends. Returns the exit code."""
    # Signals that end services are the node's, which ends this process when its pages are settled.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="kvbridge store process")
    parser.add_argument("--connection", type=int, required=True, help="descriptor of our end of a pair of sockets")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    given = parser.parse_args(arguments)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != given.parent:
        return EXIT_ORPHANED
    from kvbridge.tier.stores.serving import serve  # noqa: PLC0415 - takes a second, in which no signal may end us

    return serve(given.connection, given.log_level)


if __name__ == "__main__":
    # Mooncake runs threads of its own that do not like the interpreter's orderly end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
