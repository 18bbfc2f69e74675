"""A rank worker as a process of its own: `python -m kvbridge.daemon.worker_process`. Started by its node's supervisor only.

Owns: the process's life: it dies with its node, and its exit code says why it ended. Must not know: what it serves.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import signal
import sys
from pathlib import Path

import structlog

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank
from kvbridge.service.worker_life import open_node_link, serve_rank
from kvbridge.telemetry.logs import LogFormat, configure_logs

_PR_SET_PDEATHSIG = 1
EXIT_FAILED = 3
"""The worker could not serve; the reason was reported to the node."""

log = structlog.get_logger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Serve one rank until the node says Shutdown. Returns the exit code."""
    given = _parse(arguments)
    _die_with_parent(given.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the node decides when we end
    configure_logs(role=f"worker pp{given.pp}.tp{given.tp}", level=given.log_level, form=_form(given.log_format))
    rank = Rank(pp=given.pp, tp=given.tp)
    link = open_node_link(Path(given.socket), f"worker-{rank}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        serve_rank(link, rank, pid=os.getpid(), setup_timeout_s=given.setup_timeout_s)
    except BridgeError as error:
        log.error("worker_ends", rank=str(rank), code=error.code, reason=str(error))
        return EXIT_FAILED
    finally:
        link.close()
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvbridge rank worker")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--setup-timeout-s", type=float, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="json")
    return parser.parse_args(arguments)


def _form(name: str) -> LogFormat:
    if name == "auto":
        return "console" if sys.stderr.isatty() else "json"
    return "console" if name == "console" else "json"


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the node ends, however it ends: nobody may go on writing to its peers' memory."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    # Both transfer libraries run threads of their own that do not like the interpreter's orderly end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
