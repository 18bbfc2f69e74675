"""One process of the demo: `python -m kvbridge.cli.demo prefill|decode|alone JOB_FILE`. Started by the demo only.

Owns: which part runs, and its exit code. Must not know: what the parts do. They are imported late, so that a library that is
missing is reported like any other failure.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from kvbridge.cli.demo.job import Job, open_channel
from kvbridge.cli.engines.channel import Failed
from kvbridge.core.errors import BridgeError, UnsupportedError

EXIT_FAILED = 1
PARTS = ("prefill", "decode", "alone")


def main(part: str, job_file: Path) -> int:
    """Run a part to its end and return the exit code; its last word is an event."""
    if part not in PARTS:
        raise UnsupportedError(f"the demo has the parts {', '.join(PARTS)}, got '{part}'")
    channel = open_channel()
    try:
        module = importlib.import_module(f"kvbridge.cli.demo.{part}_process")
        module.serve(Job.model_validate_json(job_file.read_text()), channel)
    except ImportError as error:
        channel.tell(Failed(message=f"{error}; the demo needs the extra: pip install 'kvbridge[transformers]'"))
        return EXIT_FAILED
    except BridgeError as error:
        channel.tell(Failed(message=str(error)))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
