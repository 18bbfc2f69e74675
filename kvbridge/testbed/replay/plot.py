"""A replay's report as a picture: how long each phase took, and how full the pools were.

Owns: the picture. Must not know: how the report came about. matplotlib is an extra and imported late.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvbridge.core.errors import UnsupportedError
from kvbridge.testbed.replay.report import QUANTILES, ReplayReport

SHOWN = ("total", "admission", "engine_queue", "prefill", "move", "after_prefill", "offer_to_commit", "check")
"""Phases that are drawn, in this order; the table has all of them."""
SIZE_INCHES = (10.0, 9.0)
LEAST_MS = 0.01
"""Where the logarithmic axis begins."""
MISSING = "--plot needs matplotlib: pip install 'kvbridge[plot]'"


def require_plots() -> None:
    """Raise UnsupportedError when pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(MISSING)


def draw(report: ReplayReport, path: Path) -> None:
    """Write the picture as PNG. Raises UnsupportedError without matplotlib, OSError when the file cannot be written."""
    require_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    latencies, occupancy = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_latencies(latencies, report)
    _draw_occupancy(occupancy, report)
    figure.suptitle(_title(report), fontsize=10)
    figure.savefig(path, format="png", dpi=120)


def _title(report: ReplayReport) -> str:
    settings = report.settings
    return (
        f"{report.completed} of {report.requests} requests of {report.trace}: {settings['model']} over "
        f"{settings['transport']}, speed {settings['speed']:g}, {report.total.bytes / 1e9:.1f} GB, "
        f"{report.mismatched_bytes} wrong bytes"
    )


def _draw_latencies(axes: Any, report: ReplayReport) -> None:  # noqa: ANN401 - matplotlib's axes
    share = [100 * step / QUANTILES for step in range(QUANTILES + 1)]
    for name in SHOWN:
        if name in report.phases:
            phase = report.phases[name]
            milliseconds = [max(LEAST_MS, seconds * 1e3) for seconds in phase.quantiles_s]
            label = f"{name} (p50 {phase.p50_s * 1e3:,.1f}, p99 {phase.p99_s * 1e3:,.1f} ms)"
            axes.plot(milliseconds, share, label=label, linewidth=2.2 if name == "total" else 1.3)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("% of requests at most so long")
    axes.grid(visible=True, alpha=0.3)
    if report.phases:
        axes.legend(fontsize=8, loc="upper left")


def _draw_occupancy(axes: Any, report: ReplayReport) -> None:  # noqa: ANN401 - matplotlib's axes
    times = [sample.at_s for sample in report.occupancy]
    for role, spaces in report.pool_pages.items():
        for space, pages in spaces.items():
            used = [100 * sample.used_pages.get(role, {}).get(space, 0) / pages for sample in report.occupancy]
            style = "-" if role == "prefill" else "--"
            axes.plot(
                times, used, style, drawstyle="steps-post", label=f"{role} {space} ({pages} pages)", linewidth=1.2
            )
    axes.set_ylim(0, 105)
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of pages in use")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="upper right")
