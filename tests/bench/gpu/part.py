"""Runs one part in this process: `python -m tests.bench.gpu.part NAME FILE [--quick]`.

Its measurements go to FILE as they are made. The exit code is 0 when the part ran to its end.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import structlog

from tests.bench.gpu.parts import PARTS
from tests.bench.gpu.recorder import Recorder


def main() -> None:
    """Run the part. Ends without tearing CUDA down: what it left is the process's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=sorted(PARTS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    signal.signal(signal.SIGTERM, _end)
    part = importlib.import_module(f"tests.bench.gpu.{PARTS[given.name].module}")
    part.run(Recorder(given.file), quick=given.quick)
    sys.stdout.flush()
    sys.stderr.flush()


def _end(_signal: int, _frame: FrameType | None) -> None:
    """At the deadline: leave through the context managers, so that daemons and shared memory go with us."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    main()
