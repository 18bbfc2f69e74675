"""One engine process of a replay: `python -m kvbridge.cli.replay prefill|decode JOB_FILE`. Started by the replay only."""

from __future__ import annotations

import sys

from kvbridge.cli.engines.part import run_part
from kvbridge.cli.replay.job import Job, open_channel

PARTS = ("prefill", "decode")

if __name__ == "__main__":
    sys.exit(run_part("kvbridge.cli.replay", PARTS, sys.argv[1:], job=Job, channel=open_channel()))
