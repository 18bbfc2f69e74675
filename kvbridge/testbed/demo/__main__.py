"""One process of the demo: `python -m kvbridge.testbed.demo prefill|decode|alone JOB_FILE`. Started by the demo only."""

from __future__ import annotations

import sys

from kvbridge.testbed.demo.job import ORDERS, Job
from kvbridge.testbed.engines.part import run_part

PARTS = ("prefill", "decode", "alone")
MISSING = "the demo needs the extra: pip install 'kvbridge[transformers]'"

if __name__ == "__main__":
    sys.exit(run_part("kvbridge.testbed.demo", PARTS, sys.argv[1:], job=Job, orders=ORDERS, missing=MISSING))
