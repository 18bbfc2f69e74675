"""An engine process: `python -m kvbridge.testbed.engines PACKAGE PART JOB_FILE`. Started by the commands only.

Owns: its last word and its exit code. Must not know: what parts do. They are imported late, since they bring torch, and so
that a library that is missing is reported like any other failure.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from kvbridge.core.errors import BridgeError
from kvbridge.testbed.engines.channel import Channel
from kvbridge.testbed.engines.messages import Failed

EXIT_FAILED = 1


def main(package: str, part: str, job_file: str) -> int:
    """Run `PACKAGE.PART_process.serve(job, channel)` to its end, with the job and the orders that `PACKAGE.job` describes."""
    about = importlib.import_module(f"{package}.job")
    channel = Channel(about.ORDERS)
    try:
        module = importlib.import_module(f"{package}.{part}_process")
        module.serve(about.Job.model_validate_json(Path(job_file).read_text()), channel)
    except (ImportError, BridgeError) as error:
        channel.report(Failed(message=str(error)))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
