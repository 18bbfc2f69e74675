"""The main of a process that a command has started: `python -m PACKAGE PART JOB_FILE`.

Owns: which part runs, its last word and its exit code. Must not know: what parts do. They are imported late, since they
bring torch, and so that a library that is missing is reported like any other failure.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from kvbridge.core.errors import BridgeError, UnsupportedError
from kvbridge.testbed.engines.channel import Channel, Failed

EXIT_FAILED = 1


def run_part(
    package: str,
    parts: tuple[str, ...],
    arguments: list[str],
    *,
    job: type[BaseModel],
    orders: TypeAdapter[Any],
    missing: str = "",
) -> int:
    """Run `PACKAGE.PART_process.serve(job, channel)` to its end and return the exit code; its last word is an event.

    `arguments` are the part and the file of its job; `orders` validates orders; `missing` says what to do without a library.
    """
    part, job_file = arguments
    if part not in parts:
        raise UnsupportedError(f"{package} has the parts {', '.join(parts)}, got '{part}'")
    channel = Channel(orders)
    try:
        module = importlib.import_module(f"{package}.{part}_process")
        module.serve(job.model_validate_json(Path(job_file).read_text()), channel)
    except ImportError as error:
        channel.report(Failed(message=f"{error}; {missing}" if missing else str(error)))
        return EXIT_FAILED
    except BridgeError as error:
        channel.report(Failed(message=str(error)))
        return EXIT_FAILED
    return 0
