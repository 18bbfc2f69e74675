"""One engine process of a replay: `python -m kvbridge.cli.replay prefill|decode JOB_FILE`. Started by the replay only.

Owns: which engine runs, and its exit code. Must not know: what an engine does. Engines are imported late: they bring torch.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from kvbridge.cli.engines.channel import Failed
from kvbridge.cli.replay.job import Job, open_channel
from kvbridge.core.errors import BridgeError, UnsupportedError

EXIT_FAILED = 1
PARTS = ("prefill", "decode")


def main(part: str, job_file: Path) -> int:
    """Run an engine to its end and return the exit code; its last word is an event."""
    if part not in PARTS:
        raise UnsupportedError(f"a replay has the engines {', '.join(PARTS)}, got '{part}'")
    channel = open_channel()
    try:
        module = importlib.import_module(f"kvbridge.cli.replay.{part}_process")
        module.serve(Job.model_validate_json(job_file.read_text()), channel)
    except BridgeError as error:
        channel.tell(Failed(message=str(error)))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
