"""What a rank worker's process does from its start to its exit code. Loaded by `worker.process`, once that is safe from signals.

Owns: logs, the connection to the node, what is left at the end. Must not know: what it serves.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import structlog

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank
from kvbridge.telemetry.logs import configure_logs
from kvbridge.transport.local.host import PROCESS_LOCK_FILES
from kvbridge.worker.lifecycle import serve_rank
from kvbridge.worker.link import open_node_link

EXIT_FAILED = 3
"""The worker could not serve; the reason was reported to the node."""

log = structlog.get_logger(__name__)


def serve(given: argparse.Namespace) -> int:
    """Serve one rank until the node says Shutdown or is gone. Returns the exit code."""
    rank = Rank(pp=given.pp, tp=given.tp)
    names = {"role": given.role, "instance": given.instance, "node": given.node, "rank": str(rank)}
    os.set_inheritable(given.log_descriptor, False)  # it is of this process alone, and so is its end
    log_file = open(given.log_descriptor, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - to the end
    configure_logs(names=names, level=given.log_level, form="json", stream=log_file)
    link = open_node_link(Path(given.socket), rank)
    try:
        serve_rank(link, rank, setup_timeout_s=given.setup_timeout_s)
    except BridgeError as error:
        log.error("worker_ends", code=error.code, reason=str(error))
        return EXIT_FAILED
    finally:
        link.close()
        PROCESS_LOCK_FILES.remove_names()  # this process ends without the interpreter's exit handlers
    return 0
