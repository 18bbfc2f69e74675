"""The results as one picture: swap-in beside SGLang and the bare gather, page copies beside the link, first token both ways; and
as another what copies to the host tier and back reach.

Owns: the picture. matplotlib is an extra and imported late. The style is that of all pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbridge.cli.pictures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, picture
from tests.bench.gpu.comparison import Case, Results, SwapComparison, geometric_mean, swap_comparisons
from tests.bench.gpu.tables import TTFT_PHASES

SIZE_INCHES = (15.0, 11.0)
MISS_COLOURS = {0: GREY, 2: SKY, 10: BLUE, 50: ORANGE, 100: VERMILLION}
PHASE_COLOURS = (BLUE, SKY, VERMILLION, GREEN, PURPLE)
SETTINGS = ((4096, 512), (4096, 1024), (4096, 2048), (1024, 512))


def draw(results: Results, path: Path) -> None:
    """Write the picture as PNG. Panels without measurements are empty and say so."""
    with picture(path, SIZE_INCHES) as figure:
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        _draw_swaps(top, swap_comparisons(_cases(results, "swap_in")))
        pages, ttft = bottom.subplots(1, 2)
        _draw_pages(pages, [case for case in _cases(results, "copy_pages") if not case["blocks"]])
        _draw_ttft(ttft, _cases(results, "ttft"))
        devices = results["environment"].get("devices", [])
        figure.suptitle(f"kvbridge on {' + '.join(dict.fromkeys(devices)) or 'an unknown device'}")


def draw_twins(results: Results, path: Path) -> None:
    """Write the picture of the host tier as PNG: of each backend the slowest and the fastest layout, both ways."""
    cases = [case for case in _cases(results, "twin_copies") if case["what"] == "rate" and case["space"] == "full"]
    with picture(path, (11.0, 4.5)) as figure:
        for axes, way in zip(figure.subplots(1, 2, sharey=True), ("backup", "load_back"), strict=True):
            mine = [case for case in cases if case["way"] == way]
            pages = sorted({case["pages"] for case in mine})
            for backend, colour, words in (("kernel", BLUE, "kernel, 4 blocks"), ("direct", ORANGE, "copy engines")):
                rates = [
                    [case["gb_s"] for case in mine if (case["pages"], case["backend"]) == (count, backend)]
                    for count in pages
                ]
                slowest, fastest = list(map(min, rates)), list(map(max, rates))
                axes.fill_between(pages, slowest, fastest, color=colour, alpha=0.25)
                axes.plot(pages, slowest, "o-", color=colour, markersize=4, label=f"{words}: all layouts")
            link = [min(case["link_gb_s"] for case in mine if case["pages"] == count) for count in pages]
            axes.plot(pages, link, ":", color=INK, label="one pinned copy of the bytes")
            axes.set_title(f"{way.replace('_', '-').capitalize()} of scattered Flash pages, all components")
            axes.set_xscale("log", base=2)
            axes.set_xticks(pages, [str(count) for count in pages])
            axes.set_xlabel("pages of 256 tokens")
            axes.set_ylim(bottom=0)
            axes.legend(loc="lower right")
            axes.set_ylabel("GB/s")


def _cases(results: Results, part: str) -> list[Case]:
    return list(results["parts"].get(part, {}).get("cases", []))


def _draw_swaps(figure: Any, compared: Sequence[SwapComparison]) -> None:
    panels = figure.subplots(1, len(SETTINGS), sharey=True)
    if not compared:
        _leave_out(panels, "swap-in")
        return
    for axes, (hot_rows, top_k) in zip(panels, SETTINGS, strict=True):
        mine = [case for case in compared if (case.hot_rows, case.top_k) == (hot_rows, top_k)]
        for miss, colour in MISS_COLOURS.items():
            line = sorted((case for case in mine if case.miss_percent == miss), key=lambda case: case.batch)
            batches = [case.batch for case in line]
            axes.plot(batches, [case.us for case in line], "o-", color=colour, linewidth=1.8, markersize=4)
            axes.plot(batches, [case.sglang_us for case in line], "x--", color=colour, linewidth=1.0, markersize=5)
            known = [case for case in line if case.bare_gather_us]
            axes.plot([case.batch for case in known], [case.bare_gather_us for case in known], ":", color=colour)
        mean = geometric_mean([case.faster for case in mine])
        axes.set_title(f"k {top_k:,}, {hot_rows:,} hot rows: {mean:.1f} x SGLang" if mine else f"k {top_k:,}")
        _log_axes(axes, "requests in the batch", [1, 4, 16, 64, 256])
    panels[0].set_ylabel("swap-in: microseconds a layer")
    panels[0].legend(handles=_swap_legend(), loc="upper left")


def _swap_legend() -> list[Any]:
    from matplotlib.lines import Line2D

    who = [
        Line2D([], [], color=INK, marker="o", markersize=4, label="kvbridge"),
        Line2D([], [], color=INK, marker="x", linestyle="--", linewidth=1, label="SGLang 0.5.23"),
        Line2D([], [], color=INK, linestyle=":", label="bare gather of the missing rows"),
    ]
    return who + [Line2D([], [], color=colour, label=f"{miss} % missing") for miss, colour in MISS_COLOURS.items()]


def _draw_pages(axes: Any, cases: Sequence[Case]) -> None:
    if not cases:
        _leave_out([axes], "page copies")
        return
    styles = {("d2h", 1): ("o-", BLUE), ("d2h", 21): ("s--", BLUE), ("h2d", 1): ("o-", ORANGE)}
    styles[("h2d", 21)] = ("s--", ORANGE)
    words = {"d2h": "to the host", "h2d": "from the host"}
    for (way, layers), (style, colour) in styles.items():
        line = sorted((case for case in cases if (case["way"], case["layers"]) == (way, layers)), key=_bytes)
        label = f"{words[way]}, {layers} layer{'s' if layers > 1 else ''}"
        megabytes = [_bytes(case) / 1e6 for case in line]
        axes.plot(megabytes, [case["gb_s"] for case in line], style, color=colour, markersize=4, label=label)
    for way, colour in (("d2h", BLUE), ("h2d", ORANGE)):
        line = sorted((case for case in cases if case["way"] == way), key=_bytes)
        axes.plot(
            [_bytes(case) / 1e6 for case in line],
            [case["link_gb_s"] for case in line],
            ":",
            color=colour,
            label=f"one copy engine copy {words[way]}",
        )
    axes.set_title("Scattered C4 pages of 37,440 bytes by one kernel launch")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("megabytes")
    axes.set_ylabel("GB/s")
    axes.legend()


def _bytes(case: Case) -> float:
    return float(case["bytes"])


def _draw_ttft(axes: Any, cases: Sequence[Case]) -> None:
    if not cases:
        _leave_out([axes], "offer to first swap-in")
        return
    labels = [f"{case['tokens'] // 1024}k {case['way']}" for case in cases]
    left = [0.0] * len(cases)
    for phase, colour in zip(TTFT_PHASES, PHASE_COLOURS, strict=True):
        widths = [case["ms"][phase] for case in cases]
        axes.barh(labels, widths, left=left, color=colour, label=phase.replace("_", "-"))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, (case, end) in enumerate(zip(cases, left, strict=True)):
        # The median of the whole, which medians of the phases need not add up to.
        axes.text(end, position, f" {case['ms']['offer_to_first_swap_in']:.1f}", va="center", fontsize=8)
    axes.set_title("Offer to first swap-in: C4 straight to the host, or staged through decode's GPU")
    axes.set_xlabel("milliseconds, medians")
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.legend(loc="upper right")


def _leave_out(panels: Iterable[Any], what: str) -> None:
    for axes in panels:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"{what}: not measured", ha="center")


def _log_axes(axes: Any, label: str, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(label)
