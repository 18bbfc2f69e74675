"""The results as tables: for a terminal, with rich where it is installed, and for Markdown. Pure, but for printing.

Owns: which figures stand beside which. Must not know: how they were measured.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.gpu.comparison import Case, geometric_mean, sglang, swap_comparisons


@dataclass(frozen=True)
class Table:
    """Rows of text below headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def part_text(name: str, result: dict[str, Any]) -> str:
    """Everything that a part has to say, for a terminal."""
    lines = [terminal(table) for table in part_tables(name, result["cases"])]
    lines += [f"wrong: {case['wrong']} ({_short(case)})" for case in result["cases"] if case.get("wrong")]
    lines += [f"not measured: {reason}" for reason in result["skipped"]]
    if result["failed"]:
        lines.append(f"{name} FAILED: {result['failed']}")
    lines.append(f"{name}: {result['took_s']:.0f} s")
    return "\n".join(lines)


def part_tables(name: str, cases: Sequence[Case]) -> list[Table]:
    """A part's tables; none when it measured nothing."""
    if not cases:
        return []
    if name == "sparse_buys":
        from tests.bench.gpu.sparse_figures import sparse_tables  # it is made of what is here

        return sparse_tables(cases)
    return _BUILDERS[name](cases)


def terminal(table: Table) -> str:
    """By rich where it is installed."""
    if importlib.util.find_spec("rich") is None:
        return plain(table)
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    made = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(table.headings):
        made.add_column(heading, justify="left" if number == 0 else "right")
    for row in table.rows:
        made.add_row(*row)
    console = Console(file=io.StringIO(), width=160)
    console.print(made)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def plain(table: Table) -> str:
    """Columns of spaces."""
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if number == 0 else cell.rjust(width) for number, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in (table.headings, *table.rows))
    ]
    return "\n".join([table.title, *(line.rstrip() for line in lines)])


def markdown(table: Table) -> str:
    """Without the title."""
    lines = [_row(table.headings), _row(("---",) * len(table.headings)), *map(_row, table.rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float | None) -> str:
    """Three digits that count; a dash for nothing."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def share(part: float, whole: float) -> str:
    """A ratio."""
    return f"{part / whole:.2f}" if whole else "-"


# ------------------------------------------------------------------------------------------- parts


def _ceilings(cases: Sequence[Case]) -> list[Table]:
    names = {
        "h2d": "host to device, pinned, 1 GiB a GPU",
        "d2h": "device to host, pinned, 1 GiB a GPU",
        "device copy": "within a device, 1 GiB",
        "peer copy": "GPU to GPU, 1 GiB",
    }
    link = [
        (names[case["what"]], " + ".join(f"cuda:{device}" for device in case["devices"]), number(case["gb_s"]))
        for case in cases
        if case["what"] in names
    ]
    floor = [
        ("a launch inside a graph", "", f"{case['us']:.2f} us") for case in cases if case["what"] == "launch floor"
    ]
    gathers = [
        (f"{case['rows']:,}", f"{case['footprint_gib']:.3f}", number(case["us"]), number(case["gb_s"]))
        for case in cases
        if case["what"] == "bare gather"
    ]
    tables = [Table("Ceilings", ("what", "devices", "GB/s"), tuple(link + floor))]
    if gathers:
        title = "Bare gather of random rows (584 B) from host memory, cold"
        tables.append(Table(title, ("rows", "footprint GiB", "us", "GB/s"), tuple(gathers)))
    return tables


def _copy_pages(cases: Sequence[Case]) -> list[Table]:
    def rows(chosen: Sequence[Case]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (
                case["way"],
                str(case["layers"]),
                f"{case['pages']:,}",
                str(case["blocks"] or "default"),
                number(case["us"]),
                number(case["gb_s"]),
                number(case["link_gb_s"]),
                share(case["gb_s"], case["link_gb_s"]),
            )
            for case in chosen
        )

    headings = ("way", "layers", "pages", "blocks", "us", "GB/s", "one copy GB/s", "ratio")
    return [Table("C4 pages (37,440 B), scattered on both sides", headings, rows(cases))]


def _twin_copies(cases: Sequence[Case]) -> list[Table]:
    def of(what: str) -> list[Case]:
        return [case for case in cases if case["what"] == what]

    rates = tuple(
        (
            *(case[key] for key in ("way", "backend", "layout", "device_layout", "space")),
            f"{case['pages']:,}",
            number(case["us"]),
            number(case["gb_s"]),
            number(case["link_gb_s"]),
            share(case["gb_s"], case["link_gb_s"]),
        )
        for case in of("rate")
    )
    sweeps = tuple(
        (
            case["way"],
            str(case["blocks"]),
            str(case.get("loads", "")),
            number(case["gb_s"]),
            share(case["gb_s"], case["link_gb_s"]),
        )
        for case in of("sweep")
    )
    layers = tuple(
        (
            case["layout"],
            f"{case['pages']:,}",
            number(case["first_us"]),
            number(case["first_link_us"]),
            number(case["whole_us"]),
            number(case["at_once_us"]),
            share(case["whole_us"], case["at_once_us"]),
        )
        for case in of("by layer")
    )
    hosts = tuple((case["layout"], f"{case['pages']:,}", number(case["us"])) for case in of("enqueue"))
    beside = tuple(
        (
            number(case["compute_us"]),
            number(case["load_us"]),
            number(case["both_us"]),
            share(case["both_us"], max(case["compute_us"], case["load_us"])),
            str(case.get("loads", "")),
            share(case["beside_us"], case["compute_us"]),
        )
        for case in of("compute")
    )
    found = [
        Table(
            "Flash pages and their twins, scattered on both sides (4 blocks)",
            ("way", "backend", "host", "device", "space", "pages", "us", "GB/s", "one copy GB/s", "ratio"),
            rates,
        ),
        Table("The kernel's blocks and loads", ("way", "blocks", "loads", "GB/s", "ratio"), sweeps),
        Table(
            "Load-back by layer",
            ("host", "pages", "first us", "its bytes us", "whole us", "at once us", "ratio"),
            layers,
        ),
        Table("Host time to enqueue a load-back of all layers", ("host", "pages", "us"), hosts),
        Table(
            "4k new tokens on 32k restored, stand-in compute",
            ("compute us", "load us", "both us", "of the larger", "loads beside", "compute slowed"),
            beside,
        ),
    ]
    return [table for table in found if table.rows]


def _copy_rows(cases: Sequence[Case]) -> list[Table]:
    theirs = {(case["rows"], case["order"]): case["us"] for case in sglang()["row_backup"]}
    rows = tuple(
        (
            f"{case['rows']:,}",
            case["order"],
            number(case["us"]),
            number(case["gb_s"]),
            number(theirs[case["rows"], case["order"]]),
            share(theirs[case["rows"], case["order"]], case["us"]),
            number(case["link_us"]),
        )
        for case in cases
    )
    headings = ("rows", "order", "us", "GB/s", "SGLang us", "times faster", "one copy us")
    return [Table(f"Row backup, {cases[0]['layers']} layers in one launch", headings, rows)]


def _swap_in(cases: Sequence[Case]) -> list[Table]:
    tables = []
    compared = swap_comparisons(cases)
    for hot_rows, top_k in dict.fromkeys((case.hot_rows, case.top_k) for case in compared):
        rows = tuple(
            (
                str(case.batch),
                f"{case.miss_percent} %",
                number(case.us),
                number(case.sglang_us),
                f"{case.faster:.2f}",
                number(case.bare_gather_us),
                f"{case.over_gather:.2f}" if case.over_gather else "-",
            )
            for case in compared
            if (case.hot_rows, case.top_k) == (hot_rows, top_k)
        )
        headings = ("batch", "missing", "us", "SGLang us", "times faster", "bare gather us", "of gather")
        tables.append(Table(f"Swap-in, hot rows {hot_rows}, k {top_k}", headings, rows))
    if compared:
        faster = [case.faster for case in compared]
        worst = min(compared, key=lambda case: case.faster)
        where = f"hot {worst.hot_rows}, k {worst.top_k}, batch {worst.batch}, {worst.miss_percent} %"
        rows = (
            ("geometric mean", f"{geometric_mean(faster):.2f}"),
            (f"worst ({where})", f"{worst.faster:.2f}"),
            ("slower in", f"{sum(ratio < 1 for ratio in faster)} of {len(faster)}"),
        )
        tables.append(Table("Swap-in, over the whole table", ("times faster than SGLang", "ratio"), rows))
        tables.append(Table("Where SGLang's figures come from", ("",), ((sglang()["source"],),)))
    return tables


def _swap_in_layouts(cases: Sequence[Case]) -> list[Table]:
    apart = {(case["batch"], case["miss_percent"]): case for case in cases if case["host_layout"] == "layer_first"}
    together = [case for case in cases if case["host_layout"] == "page_first"]
    rows = tuple(
        (
            str(case["batch"]),
            f"{case['miss_percent']} %",
            number(beside["us"]),
            number(case["us"]),
            share(case["us"], beside["us"]),
            number(beside["bare_gather_us"]),
            number(case["bare_gather_us"]),
        )
        for case in together
        if (beside := apart.get((case["batch"], case["miss_percent"])))
    )
    headings = ("batch", "missing", "layer_first us", "page_first us", "ratio", "bare gather us", "bare, page_first us")
    return [Table("Swap-in by layout of the host pool, hot rows 4096, k 512", headings, rows)]


def _transport(cases: Sequence[Case]) -> list[Table]:
    rows = tuple(
        (
            "host pool" if case["to"] == "host" else f"device {case['to']} (CUDA IPC)",
            str(case["gpus"]),
            f"{case['tokens'] // 1024}k",
            f"{case['operation_bytes']:,}",
            number(case["bytes"] / 1e6),
            number(case["gb_s"]),
            number(case["copy_gb_s"]),
            share(case["gb_s"], case["copy_gb_s"]),
        )
        for case in cases
    )
    headings = ("to", "GPUs", "tokens", "operation B", "MB", "GB/s", "one copy GB/s", "ratio")
    return [Table("Local transport: C4 of a request, 21 layers, scattered", headings, rows)]


def _copy_phases(cases: Sequence[Case]) -> list[Table]:
    rows = tuple(
        (
            case["to"],
            str(case["gpus"]),
            f"{case['tokens'] // 1024}k",
            case["tried"],
            *(number(1e6 * case[phase]) for phase in ("submitted_s", "device_began_s", "late_s")),
            str(case["slices"]),
            number(1e6 * case["waited_s"]),
            number(case["device_gb_s"]),
            number(case["gb_s"]),
            share(case["gb_s"], case["copy_gb_s"]),
        )
        for case in cases
    )
    headings = ("to", "GPUs", "tokens", "tried", "submitted us", "device begins us", "noticed late us")
    more = ("slices", "device waited us", "device GB/s", "GB/s", "of one copy")
    return [Table("Local transport, C4 of a request in pages of 37,440 B, part by part", (*headings, *more), rows)]


TTFT_PHASES = ("transfer", "claim", "backup", "admission", "swap_in")


def _ttft(cases: Sequence[Case]) -> list[Table]:
    rows = tuple(
        (
            f"{case['tokens'] // 1024}k",
            case["way"],
            *(number(case["ms"][phase]) for phase in TTFT_PHASES),
            number(case["ms"]["offer_to_first_swap_in"]),
            number(case["ms"]["with_http"]),
        )
        for case in cases
    )
    headings = ("tokens", "way", *(phase.replace("_", "-") for phase in TTFT_PHASES), "all", "with HTTP")
    return [Table("Offer to first swap-in through real daemons, milliseconds (medians)", headings, rows)]


def _digest(cases: Sequence[Case]) -> list[Table]:
    rows = tuple(
        (
            f"{case['pages']:,}",
            number(case["us"]),
            number(case["gb_s"]),
            number(case["read_gb_s"]),
            share(case["gb_s"], case["read_gb_s"]),
        )
        for case in cases
    )
    return [Table("CRC-32C of device pages, a call", ("pages", "us", "GB/s", "reading GB/s", "ratio"), rows)]


_BUILDERS = {
    "ceilings": _ceilings,
    "copy_pages": _copy_pages,
    "twin_copies": _twin_copies,
    "copy_rows": _copy_rows,
    "digest": _digest,
    "transport": _transport,
    "copy_phases": _copy_phases,
    "ttft": _ttft,
    "swap_in_layouts": _swap_in_layouts,
    "swap_in": _swap_in,
}


def _short(case: Case) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items() if isinstance(value, str | int) and key != "wrong")
