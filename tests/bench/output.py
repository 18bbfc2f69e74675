"""The parts of every benchmark: the machine it ran on, tables of text, and the JSON that it leaves."""

import importlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import structlog

LIBRARIES = ("numpy", "torch", "pyzmq", "mooncake-transfer-engine-non-cuda", "nixl-cu12")
LINE = 150
MOST_SAMPLES = 3
"""A longer list of numbers is written as its median and range."""


def measure(name: str, *, quick: bool) -> tuple[dict[str, Any], str]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    bench = importlib.import_module(f"tests.bench.{name}" if "." in name else f"tests.bench.bench_{name}")
    load = [os.getloadavg()[0]]
    found = bench.run(quick=quick)
    load.append(os.getloadavg()[0])
    return {"load": load} | found, f"load {load[0]:.1f} before, {load[1]:.1f} after\n{bench.table(found)}"


def environment() -> dict[str, Any]:
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    versions = {name: installed[name] for name in LIBRARIES if name in installed}
    return {"python": platform.python_version(), "cpu": cpu, "libraries": versions}


def write(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Write results to `folder` under the name and the time, every list of samples as its median and range."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(lines(reduced(results)) + "\n")
    print(f"written to {path}")


def reduced(found: Any) -> Any:
    """Return the same with every longer list of numbers as {"median", "least", "most", "of"}."""
    if isinstance(found, dict):
        return {str(key): reduced(value) for key, value in found.items()}
    if not isinstance(found, list | tuple):
        return float(f"{found:.5g}") if isinstance(found, float) else found
    if len(found) > MOST_SAMPLES and all(isinstance(each, int | float) for each in found):
        shown = {"median": median(found), "least": min(found), "most": max(found)}
        return reduced(shown) | {"of": len(found)}
    return [reduced(each) for each in found]


def lines(found: Any, indent: str = "") -> str:
    """Return JSON in which whatever is short, or has nothing below it, is one line."""
    whole = json.dumps(found)
    parts = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else []
    if len(whole) <= LINE or not any(isinstance(each, dict | list) for each in parts):
        return whole
    below = indent + " "
    if isinstance(found, dict):
        shown = [f"{below}{json.dumps(key)}: {lines(value, below)}" for key, value in found.items()]
        return "\n".join(("{", ",\n".join(shown), indent + "}"))
    return "\n".join(("[", ",\n".join(below + lines(value, below) for value in found), indent + "]"))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """Return columns of text below headings: numbers with three digits that count, a dash for None."""
    cells = [list(headings), *([_cell(each) for each in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    shown = (
        "  ".join(cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (zip(row, widths, strict=True) for row in cells)
    )
    return "\n".join([*([title] if title else []), *shown])


def cases_table(cases: Sequence[dict[str, Any]]) -> str:
    return table(list(cases[0]), (list(case.values()) for case in cases))


def met(holds: bool) -> str:
    return "met" if holds else "MISSED"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    return f"{number(median(values))} ({number(min(values))} - {number(max(values))})" if values else "-"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that so many percent of all are not above; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))] if ordered else float("nan")
