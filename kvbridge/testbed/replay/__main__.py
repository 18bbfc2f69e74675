"""One engine process of a replay: `python -m kvbridge.testbed.replay prefill|decode JOB_FILE`. Started by the replay only."""

from __future__ import annotations

import sys

from kvbridge.testbed.engines.part import run_part
from kvbridge.testbed.replay.job import ORDERS, Job

PARTS = ("prefill", "decode")

if __name__ == "__main__":
    sys.exit(run_part("kvbridge.testbed.replay", PARTS, sys.argv[1:], job=Job, orders=ORDERS))
