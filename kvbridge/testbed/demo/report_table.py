"""The report of a demo as a table and notes, for a person.

Owns: columns, units and words. Must not know: how the report came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount, add_amounts
from kvbridge.testbed.demo.job import SparseFigures
from kvbridge.testbed.demo.report import DemoReport, HotBuffer, RequestReport

WIDE = 108
"""From so many columns on, every component has its own."""
STATES = (ComponentKind.C4_STATE, ComponentKind.C4_INDEXER_STATE, ComponentKind.C128_STATE)
MIB = 1 << 20
TEXT_WIDTH = 100
NOT_ADDED = {"#", "rows", "turn", "ms"}
"""Columns that have no sum."""
_LEGEND = (
    "Bytes that arrived, by component, with K and M for KiB and MiB. Move: plan, submit and wait until arrived, all chunks "
    "of the busiest prefill rank added; MiB/s is bytes by that. Tail: from the end of the prompt's computation until decode "
    "could claim it (last line: the median)."
)

_TURN_LEGEND = (
    "Turn: which one of which conversation; its prompt is all that was said before, and something new; cold: without reuse. Held: "
    "tokens that decode had already, which were not sent. Computed: by prefill, which had the others. Sent: bytes, windows and "
    "states among them, with K and M for KiB and MiB; whole: without reuse. Ms: from the router's request until decode had the "
    "cache and the first token, beside what else was running."
)
_SPARSE_LEGEND = (
    "Rows: the C4 context of one layer at the end. Selected, all layers and steps: in the ring of new rows, in hot slots, or "
    "loaded from the host pool, where others then gave way. To host: new rows, by whole pages."
)

_Column = tuple[str, Callable[[RequestReport], str]]
"""Its title, and the cell of a request; that of all requests together is the cell of their sum."""


def print_report(report: DemoReport, console: Console) -> None:
    """Print the table and what it adds up to, in the width that the console has; the last line is the verdict."""
    together = _together(report.requests)
    columns = _TURN_COLUMNS if report.turns else _columns(wide=console.width >= WIDE)
    _print_table(report, together, columns, console)
    if report.hot_buffer is not None:
        _print_table(report, together, _SPARSE_COLUMNS, console)
    for line in _notes(report):
        console.print(Text(line), width=min(console.width, TEXT_WIDTH))
    console.print()
    console.print(Text(report.verdict, style="bold green" if report.good else "bold red"), soft_wrap=True)


def _print_table(report: DemoReport, together: RequestReport, columns: Sequence[_Column], console: Console) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for request in report.requests:
        table.add_row(*(cell(request) for _, cell in columns), style="" if request.equal else "bold red")
    table.add_row()
    totals = ("" if title in NOT_ADDED else cell(together) for title, cell in columns)
    table.add_row(*totals, style="bold")
    console.print(table)
    console.print()


def _together(requests: Sequence[RequestReport]) -> RequestReport:
    """Return at least one request as one: sums, the median tail, and the first comparison that was not equal."""
    moving_s = [request.moving_s for request in requests]
    tails_s = sorted(request.after_prefill_s for request in requests)
    figures = [request.sparse.model_dump() for request in requests if request.sparse is not None]
    summed = {name: sum(each[name] for each in figures) for name in SparseFigures.model_fields}
    return min(requests, key=lambda request: request.equal).model_copy(
        update={
            "prompt_tokens": sum(request.prompt_tokens for request in requests),
            "prefix_tokens": sum(request.prefix_tokens for request in requests),
            "computed_tokens": sum(request.computed_tokens for request in requests),
            "spared_bytes": sum(request.spared_bytes for request in requests),
            "amounts": reduce(add_amounts, [request.amounts for request in requests]),
            "moving_s": None if None in moving_s else sum(filter(None, moving_s)),
            "after_prefill_s": tails_s[len(tails_s) // 2],
            "sparse": SparseFigures(**summed) if figures else None,
        }
    )


def _sparse(title: str, cell: Callable[[SparseFigures], str]) -> _Column:
    return title, lambda request: "-" if request.sparse is None else cell(request.sparse)


_NUMBER: _Column = ("#", lambda request: str(request.number))
_EQUAL: _Column = ("equal", lambda request: "yes" if request.equal else "NO")
_SPARSE_COLUMNS = (
    _NUMBER,
    _sparse("rows", lambda each: f"{each.rows:,}"),
    _sparse("selected", lambda each: f"{each.selected:,}"),
    _sparse("in ring", lambda each: _percent(each.in_ring, each.selected)),
    _sparse("in slots", lambda each: _percent(each.in_hot_slots, each.selected)),
    _sparse("loaded", lambda each: f"{each.loaded:,}"),
    _sparse("evicted", lambda each: f"{each.evicted:,}"),
    _sparse("to host", lambda each: f"{each.backed_up:,}"),
    _EQUAL,
)


def _turn(request: RequestReport) -> str:
    name = f"{request.turn} of {request.conversation}"
    return name if request.page_keys else f"{name} cold"


_TURN_COLUMNS = (
    _NUMBER,
    ("turn", _turn),
    ("tokens", lambda request: f"{request.prompt_tokens:,}"),
    ("held", lambda request: f"{request.prefix_tokens:,}"),
    ("computed", lambda request: f"{request.prompt_tokens - request.computed_tokens:,}"),
    ("sent", lambda request: format_bytes(request.total.bytes)),
    ("whole", lambda request: format_bytes(request.total.bytes + request.spared_bytes)),
    ("ms", lambda request: f"{request.arrival_s * 1000:,.0f}"),
    _EQUAL,
)


def _component(title: str, *kinds: ComponentKind) -> _Column:
    return title, lambda request: format_bytes(sum(request.amounts.get(kind, Amount()).bytes for kind in kinds))


def _columns(*, wide: bool) -> list[_Column]:
    states = (
        [
            _component("c4 state", ComponentKind.C4_STATE),
            _component("idx state", ComponentKind.C4_INDEXER_STATE),
            _component("c128 state", ComponentKind.C128_STATE),
        ]
        if wide
        else [_component("state", *STATES)]
    )
    return [
        _NUMBER,
        ("tokens", lambda request: f"{request.prompt_tokens:,}"),
        _component("c4", ComponentKind.C4_KV),
        _component("c4 idx" if wide else "idx", ComponentKind.C4_INDEXER),
        _component("c128", ComponentKind.C128_KV),
        _component("window" if wide else "swa", ComponentKind.SWA_KV),
        *states,
        ("all", lambda request: format_bytes(request.total.bytes)),
        ("ops", lambda request: f"{request.total.operations:,}"),
        ("move ms", lambda request: _milliseconds(request.moving_s)),
        ("MiB/s", lambda request: f"{request.total.bytes / MIB / request.moving_s:,.0f}" if request.moving_s else "-"),
        ("tail ms", lambda request: _milliseconds(request.after_prefill_s)),
        _EQUAL,
    ]


def _notes(report: DemoReport) -> list[str]:
    ids = ", ".join(f"{space} {found.different}/{found.compared}" for space, found in sorted(report.page_ids.items()))
    others = "all rows its own prompt's" if report.keep_answers else "unquantised rows"
    stages = " + ".join(f"{len(layers)}" for layers in report.prefill_stages)
    lines = [
        _TURN_LEGEND if report.turns else _LEGEND,
        (
            f"Model {report.model}, random weights, {report.encoding} rows; prefill in {len(report.prefill_stages)} stage(s) "
            f"of {stages} layers; transport {report.transport}; device {report.device}; up to {report.most_in_flight} requests in "
            "flight at once."
        ),
        f"Page ids differed between the two sides in: {ids} requests; scattered pages in {report.scattered_requests}.",
    ]
    if report.hot_buffer is not None:
        lines += _sparse_notes(report, report.hot_buffer)
    if report.turns:
        lines += _turn_notes(report)
    if report.divergence is not None:
        lines.append(
            f"Against the model with whole caches and {others}: mean KL divergence "
            f"{report.divergence.mean_kl:.2e} nats a step, same most likely token in {report.divergence.top1_agreement:.1%} of the "
            "steps."
        )
    if report.pages_left:
        lines.append(
            f"{report.pages_left} pages were not given back in the end: a defect of kvbridge, please report it."
        )
    spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.seconds.items())
    lines.append(f"Time: {spent}.")
    return lines


def _turn_notes(report: DemoReport) -> list[str]:
    lines = []
    if report.host_tier:
        lines.append(_host_note(report))
    if not report.reused:
        what = "came back from host memory" if report.host_tier else "was reused"
        lines.append(f"Nothing {what} on one of the two sides: this run has not shown what it is there to show.")
    hits, colds = (
        [each for each in report.requests if each.by_itself and each.page_keys is keys] for keys in (True, False)
    )
    if hits and colds:
        hit_s, cold_s = (median(request.arrival_s for request in requests) for requests in (hits, colds))
        lines.append(
            f"What a hit is worth: a prompt of {hits[0].prompt_tokens:,} tokens, by itself, had its first token on decode after "
            f"{cold_s * 1000:,.0f} ms without reuse and after {hit_s * 1000:,.0f} ms with it: {cold_s / hit_s:.1f} times as fast "
            f"(medians of {len(hits)} each, in turns)."
        )
    return lines


def _host_note(report: DemoReport) -> str:
    from_host = report.host_tokens
    sides = []
    for side, held, back in (
        ("prefill", sum(request.computed_tokens for request in report.requests), from_host.prefill),
        ("decode", sum(request.prefix_tokens for request in report.requests), from_host.decode),
    ):
        sides.append(f"on {side} {held - back:,} tokens of prefixes came from the device and {back:,} from host memory")
    return f"Host tier: {', '.join(sides)}."


def _sparse_notes(report: DemoReport, buffer: HotBuffer) -> list[str]:
    figures = [request.sparse for request in report.requests if request.sparse is not None]
    loaded, selected = sum(each.loaded for each in figures), sum(each.selected for each in figures)
    longest = max(each.rows for each in figures)
    whole_bytes = longest * buffer.layers * buffer.row_bytes
    steps = sum(request.steps for request in report.requests)
    share = max((request.share_of_rounding or 0.0 for request in report.requests), default=0.0)
    return [
        _SPARSE_LEGEND,
        (
            f"Sparse decode: {steps:,} steps, {steps * buffer.layers:,} swap-ins of up to {buffer.top_k} rows, in "
            f"{buffer.layers} C4 layers; {_percent(selected - loaded, selected)} of the selected rows were on the device already."
        ),
        (
            "In every step and C4 layer the sum over the selected rows is the dense model's over all rows, with at most "
            f"{share:.1e} of the difference that rounding explains."
        ),
        (
            f"Hot buffer: {buffer.hot_rows} rows and a ring of {buffer.ring_rows} a layer, {format_bytes(buffer.request_bytes)} a "
            f"request with its tables; the longest C4 cache has {longest:,} rows a layer, {format_bytes(whole_bytes)} on the host."
        ),
    ]


def format_bytes(count: int) -> str:
    """Return a byte count in at most five characters: '-', '512', '37.5K', '1.2M'."""
    if not count:
        return "-"
    amount = float(count)
    for unit in ("", "K", "M", "G"):
        if amount < 999.5 or unit == "G":
            return f"{amount:.0f}{unit}" if not unit or amount >= 99.95 else f"{amount:.1f}{unit}"
        amount /= 1024
    return ""


def _percent(count: int, whole: int) -> str:
    return f"{count / whole:.1%}" if whole else "-"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
