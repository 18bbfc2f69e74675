"""Request traces written by tests."""

import json
from pathlib import Path

LENGTHS = (1, 257, 1000, 130, 513, 64, 300, 255, 2048, 3)
"""Prompt lengths at the edges of pages and windows."""


def trace_line(number: int = 0, **changes: object) -> dict[str, object]:
    tokens = LENGTHS[number % len(LENGTHS)]
    line = {"timestamp": 50 * number, "input_length": tokens, "output_length": 5 + number, "hash_ids": [0, number]}
    return line | changes


def write_trace(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(trace_line(number)) + "\n" for number in range(count)))
    return path
