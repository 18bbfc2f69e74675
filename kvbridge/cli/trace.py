"""Request traces: one JSON object a line, as Mooncake's FAST'25 traces have them.

A line is {"timestamp": milliseconds since the trace began, "input_length": tokens, "output_length": tokens, "hash_ids": one
number for each block of 512 tokens of the prompt, equal where prompts share a prefix}. Other keys are ignored, `hash_ids` may be
missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import NonNegative

BLOCK_TOKENS = 512
"""Tokens of the prompt that one of `hash_ids` stands for."""
MOST_TOKENS = 1 << 24
"""No request of any trace is as long; a larger number is a mistake in the file."""


class TraceRequest(BaseModel):
    """One request of a trace."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """When it arrives, in milliseconds since the trace began."""
    input_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    """Tokens of its prompt."""
    output_length: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Tokens that are generated for it."""
    hash_ids: tuple[NonNegative, ...] = ()


def read_trace(path: Path, *, count: int = 0) -> tuple[TraceRequest, ...]:
    """Return the first `count` requests (0: all), in the order of the file. Lines behind them are not looked at.

    Raises InvalidInputError naming the file and the line that is wrong, or a file that has too few requests.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = tuple(islice(_requests(path, file), count or None))
    except OSError as error:
        raise InvalidInputError(f"--trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"--trace {path}: not a text file ({error.reason} at byte {error.start})") from error
    if len(requests) < max(1, count):
        raise InvalidInputError(f"--trace {path}: has {len(requests)} requests, {max(1, count)} are asked for")
    return requests


def prompt_tokens(request: TraceRequest, number: int) -> npt.NDArray[np.uint32]:
    """Return token ids for a prompt of which a trace tells no more than `hash_ids`: equal to those of others where these are.

    Blocks without an id are shared with no request of another `number`.
    """
    ids = np.full(
        -(-request.input_length // BLOCK_TOKENS), (1 << 63) + number, dtype="<u8"
    )  # no block of a trace has such an id
    told = request.hash_ids[: len(ids)]
    ids[: len(told)] = told
    return np.repeat(ids, BLOCK_TOKENS // 2).view("<u4")[: request.input_length]


def _requests(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    latest = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = TraceRequest.model_validate_json(line)
        except ValidationError as error:
            raise InvalidInputError(f"--trace {path}, line {number}: {_fault(error)}") from error
        if request.timestamp < latest:
            raise InvalidInputError(
                f"--trace {path}, line {number}: timestamp {request.timestamp:g} comes after {latest:g}; "
                "requests have to be in the order of their arrival"
            )
        latest = request.timestamp
        yield request


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"has no '{where}'"
    got = f", got {first['input']!r}" if where and len(repr(first["input"])) <= 80 else ""
    return f"{where + ': ' if where else ''}{first['msg']}{got}"
