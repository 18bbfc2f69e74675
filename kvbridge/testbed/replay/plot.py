"""A replay's report as a picture: where the time went, what the bridge did meanwhile, how full the pools were, how fast it was.

Owns: the picture and its words. Must not know: how the report came about.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbridge.cli.pictures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, QUIET, SKY, VERMILLION, YELLOW, picture
from kvbridge.testbed.replay.report import ReplayReport, Sample

SIZE_INCHES = (12.0, 12.0)
STEPS = {
    "admission": ("waits for admission", PURPLE),
    "engine_queue": ("waits for the prefill engine", YELLOW),
    "prefill": ("prefill engine writes the prompt", SKY),
    "after_prefill": ("bridge moves what is left", VERMILLION),
    "commit_to_claim": ("waits for the decode engine", GREY),
    "check": ("decode engine compares every byte", GREEN),
    "hold": ("decode engine holds the pages", BLUE),
}
"""What `report.STEPS` are called, and their colours."""
INSIDE = {
    "ticket": "bootstrap grants a pair",
    "admit_to_offer": "decode sends its page tables",
    "offer_to_order": "prefill waits for the first chunk",
    "plan": "planning, all chunks",
    "first_byte": "order until first bytes, all chunks",
    "move": "bytes under way, all chunks",
    "digest": "prefill computes checksums",
    "verify": "decode compares checksums",
    "offer_to_commit": "from page tables until all has arrived",
}
"""What phases are called that overlap one another or the steps."""
SPACES = {
    "full": "token pages",
    "host": "host pages",
    "swa": "sliding-window pages",
    "request": "request slots",
    "full_twin": "token pages on the host",
    "swa_twin": "checkpoints on the host",
}
ROLES = {"prefill": BLUE, "decode": ORANGE}
QUANTILES = {"p50": (SKY, "o", "half of the requests"), "p90": (BLUE, "s", "90 %"), "p99": (VERMILLION, "D", "99 %")}
UNITS = (("s", 1.0), ("ms", 1e-3))
LABELLED_SHARE = 0.062
"""Of the longest bar; narrower pieces have no room for their figure."""


def draw(report: ReplayReport, path: Path) -> None:
    """Write the picture as PNG. Raises UnsupportedError without matplotlib, OSError when the file cannot be written."""
    with picture(path, SIZE_INCHES) as figure:
        durations, times = figure.subfigures(2, 1, height_ratios=(6, 5))
        steps, inside = durations.subplots(2, 1)
        _draw_steps(steps, report)
        _draw_inside(inside, report)
        columns = times.subfigures(1, 3)
        for column, role in zip(columns, ROLES, strict=False):
            _draw_pools(column, report, role)
        _draw_rates(columns[-1], report)
        figure.suptitle(title(report), fontsize=13)


def title(report: ReplayReport) -> str:
    """Say what was replayed and how it ended."""
    settings = report.settings
    without = f" of {report.whole_bytes / 1e9:,.1f}" if settings["prefixes"] else ""
    return (
        f"{report.completed} of {report.requests} requests of {report.trace} served\n{settings['model']} over "
        f"{settings['transport']}, {report.total.bytes / 1e9:,.1f}{without} GB, {report.mismatched_bytes:,} wrong bytes"
    )


def headline(report: ReplayReport) -> str:
    """Say how long requests took, and what the slowest spent most of it on."""
    if not report.breakdown:
        return "No request was served: there are no durations"
    took = {name: sum(steps.values()) for name, steps in report.breakdown.items()}
    slowest = report.breakdown["p99"]
    most = max(slowest, key=lambda step: slowest[step])
    return (
        f"Half of the requests took at most {duration(took['p50'])}, 99 % at most {duration(took['p99'])};\n"
        f"the largest part of that: {STEPS[most][0]} ({100 * slowest[most] / took['p99']:.0f} %)"
    )


def duration(seconds: float) -> str:
    """Write a duration with three digits, in the unit that suits it."""
    scale, unit = next(((1 / least_s, unit) for unit, least_s in UNITS if seconds >= least_s), (1e6, "µs"))
    value = seconds * scale
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def rates(samples: tuple[Sample, ...]) -> tuple[list[float], list[float], list[float]]:
    """Return when each interval between two samples began (s), the bytes and the requests per second in it."""
    pairs = [(one, two) for one, two in pairwise(samples) if two.at_s > one.at_s]
    return (
        [one.at_s for one, _ in pairs],
        [(two.arrived_bytes - one.arrived_bytes) / (two.at_s - one.at_s) for one, two in pairs],
        [(two.completed - one.completed) / (two.at_s - one.at_s) for one, two in pairs],
    )


def _draw_steps(axes: Any, report: ReplayReport) -> None:  # noqa: ANN401 - matplotlib's axes
    axes.set_title(headline(report))
    longest = max((sum(steps.values()) for steps in report.breakdown.values()), default=0.0)
    left = dict.fromkeys(report.breakdown, 0.0)
    for step, (words, colour) in STEPS.items():
        widths = [steps[step] for steps in report.breakdown.values()]
        if not any(widths):
            continue
        bars = axes.barh(list(left), widths, 0.7, list(left.values()), color=colour, edgecolor="white", label=words)
        shown = [duration(width) if width >= LABELLED_SHARE * longest else "" for width in widths]
        ink = "white" if colour in {BLUE, VERMILLION} else INK
        axes.bar_label(bars, shown, label_type="center", color=ink, fontsize=8)
        left = {name: start + width for (name, start), width in zip(left.items(), widths, strict=True)}
    for position, (name, end) in enumerate(left.items()):
        words = f"  {duration(end)}, the bridge {duration(report.breakdown[name]['after_prefill'])}"
        axes.text(end, position, words, va="center", weight="bold")
    axes.set_yticks(range(len(left)), [f"{QUANTILES[name][2]}\ntake at most" for name in left], color=INK)
    axes.set_xlabel(
        "seconds from due until given back; each bar is divided as the requests near that percentile were, on average"
    )
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.27)  # room for what stands behind the longest bar
    axes.invert_yaxis()
    if left:
        axes.legend(ncols=4, loc="upper left", bbox_to_anchor=(-0.01, -0.2), borderaxespad=0)


def _draw_inside(axes: Any, report: ReplayReport) -> None:  # noqa: ANN401 - matplotlib's axes
    axes.set_title("What the bridge did meanwhile, by request (overlapping; logarithmic scale)")
    known = [name for name in INSIDE if name in report.phases]
    for quantile, (colour, marker, words) in QUANTILES.items():
        values = [getattr(report.phases[name], f"{quantile}_s") * 1e3 for name in known]
        axes.plot(values, range(len(known)), marker, color=colour, label=words, markersize=6, zorder=3)
    ends = [(report.phases[name].p50_s * 1e3, report.phases[name].p99_s * 1e3) for name in known]
    for position, (least, most) in enumerate(ends):
        axes.hlines(position, least, most, color=GREY, linewidth=2)
    axes.set_yticks(range(len(known)), [INSIDE[name] for name in known], color=INK)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.set_xlabel("milliseconds")
    axes.margins(y=0.12)
    axes.invert_yaxis()
    axes.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)


def _draw_pools(figure: Any, report: ReplayReport, role: str) -> None:  # noqa: ANN401 - matplotlib's figure
    pools = [(space, report.pool_pages[role][space]) for space in SPACES if report.pool_pages.get(role, {}).get(space)]
    if not pools:
        return
    figure.suptitle(f"Pools of {role}: part that is in use", fontsize=10)
    times = [sample.at_s for sample in report.occupancy]
    panels = figure.subplots(len(pools), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (space, pages) in zip(panels, pools, strict=True):
        used = [100 * sample.used_pages.get(role, {}).get(space, 0) / pages for sample in report.occupancy]
        _fill(axes, times, used, ROLES[role])
        axes.set_title(
            f"{SPACES[space]}: at most {max(used, default=0):.0f} % of {pages:,}", fontsize=9, weight="normal"
        )
        axes.set_ylim(0, 100)
        axes.set_yticks((0, 50, 100), ("0", "50", "100 %"))
    panels[-1].set_xlabel("seconds")


def _draw_rates(figure: Any, report: ReplayReport) -> None:  # noqa: ANN401 - matplotlib's figure
    begun, bytes_per_s, requests_per_s = rates(report.occupancy)
    last = [report.occupancy[-1].at_s] if begun else []
    gb_per_s = [each / 1e9 for each in bytes_per_s]
    in_flight = [sample.in_flight for sample in report.occupancy]
    replay_s = report.seconds.get("replay", 0.0)
    per_s = 1 / replay_s if replay_s else 0.0
    figure.suptitle("How fast it was", fontsize=10)
    panels = figure.subplots(4 if report.settings["prefixes"] else 3, 1, sharex=True)
    bandwidth, served, flying = panels[:3]
    _fill(bandwidth, begun + last, gb_per_s + gb_per_s[-1:], GREEN)
    bandwidth.set_title(f"arrived: {report.total.bytes * per_s / 1e9:.2f} GB/s on average", fontsize=9, weight="normal")
    _fill(served, begun + last, requests_per_s + requests_per_s[-1:], GREEN)
    served.set_title(f"served: {report.completed * per_s:.1f} requests/s on average", fontsize=9, weight="normal")
    _fill(flying, [sample.at_s for sample in report.occupancy], in_flight, PURPLE)
    flying.set_title(f"in flight: at most {report.most_in_flight} requests", fontsize=9, weight="normal")
    for axes in panels[3:]:
        _draw_found(axes, report)
    panels[-1].set_xlabel("seconds")
    for axes in panels:
        axes.set_ylim(bottom=0)


def _draw_found(axes: Any, report: ReplayReport) -> None:  # noqa: ANN401 - matplotlib's axes
    """Draw which part of all prompts so far was found on each side."""
    samples = [sample for sample in report.occupancy if sample.arrived_tokens]
    times = [sample.at_s for sample in samples]
    last = []
    for where, colour in {"endless": GREY, **ROLES}.items():
        shares = [100 * sample.found_tokens[where] / sample.arrived_tokens for sample in samples]
        axes.plot(times, shares, color=colour, linewidth=1.3)
        last.append(f"{where} {shares[-1] if shares else 0:.1f}")
    axes.set_title(f"found of prompts, %: {', '.join(last)}", fontsize=9, weight="normal")
    axes.tick_params(colors=QUIET, labelsize=8)
    axes.margins(x=0)


def _fill(axes: Any, times: list[float], values: list[float] | list[int], colour: str) -> None:  # noqa: ANN401 - matplotlib's axes
    axes.fill_between(times, values, step="post", color=colour, alpha=0.35, linewidth=0)
    axes.step(times, values, where="post", color=colour, linewidth=1.3)
    axes.tick_params(colors=QUIET, labelsize=8)
    axes.margins(x=0)
