"""What a demo found out, as data, as a table and as JSON.

Owns: the report and its forms. Must not know: how it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from pydantic import computed_field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.plan.operations import Amount, Amounts, add_amounts
from kvbridge.testbed.demo.job import Pages, SparseFigures
from kvbridge.testbed.demo.verdict import Comparison

WIDE = 108
"""From so many columns on, every component has its own."""
STATES = (ComponentKind.C4_STATE, ComponentKind.C4_INDEXER_STATE, ComponentKind.C128_STATE)
MIB = 1 << 20
TEXT_WIDTH = 100
NOT_ADDED = {"#", "rows"}
"""Columns that have no sum."""
_LEGEND = (
    "Bytes that arrived, by component, with K and M for KiB and MiB. Move: plan, submit and wait until arrived, all chunks "
    "of the busiest prefill rank added; MiB/s is bytes by that. Tail: from the end of the prompt's computation until decode "
    "could claim it (last line: the median)."
)

_SPARSE_LEGEND = (
    "Rows: the C4 context of one layer at the end. Selected, all layers and steps: in the ring of new rows, in hot slots, or "
    "loaded from the host pool, where others then gave way. To host: new rows, by whole pages."
)


class RequestReport(FrozenModel):
    """One request that went over the bridge."""

    number: Positive
    prompt_tokens: Positive
    steps: Positive
    amounts: Amounts
    """What arrived, by component."""
    moving_s: float | None
    """Plan, submit and wait until arrived, all chunks of the busiest prefill rank added; None if it did not say."""
    after_prefill_s: float
    """From the end of the prompt's computation until the request could be claimed: what the bridge added."""
    source_pages: Pages
    destination_pages: Pages
    comparison: Comparison
    mean_kl: float | None = None
    top1_agreement: float | None = None
    share_of_rounding: float | None = None
    sparse: SparseFigures | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def equal(self) -> bool:
        """Whether every logit is the model's own."""
        return self.comparison.equal

    @property
    def total(self) -> Amount:
        """All components together."""
        return reduce(Amount.__add__, self.amounts.values(), Amount())


class PageIds(FrozenModel):
    """Whether the two ends of the requests really were different places."""

    compared: NonNegative
    different: NonNegative


class Divergence(FrozenModel):
    """How far quantised rows and sums in another order took the model from itself."""

    mean_kl: float
    """In nats a step, over all requests."""
    top1_agreement: float


class HotBuffer(FrozenModel):
    """What sparse decode kept on the device of a request's C4 cache."""

    hot_rows: Positive
    """Of a request, in each layer."""
    ring_rows: Positive
    """Of a request, in each layer: the newest rows."""
    top_k: Positive
    """Rows that attention reads in a step and layer."""
    layers: Positive
    request_bytes: Positive
    """Device memory of a request: rows and tables of all layers."""
    row_bytes: Positive


class DemoReport(FrozenModel):
    """A whole demo."""

    verdict: str
    transport: str
    device: str = "cpu"
    """Where the models compute and where device pools are."""
    encoding: str
    prefill_stages: tuple[tuple[int, ...], ...]
    """The layers of each."""
    model: str
    weights: str
    versions: dict[str, str]
    requests: tuple[RequestReport, ...]
    most_in_flight: NonNegative
    hot_buffer: HotBuffer | None = None
    """None: decode kept whole caches."""
    pages_left: NonNegative = 0
    """Pages that were not free again at the end; 0 unless there is a defect."""
    seconds: dict[str, float]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def equal(self) -> bool:
        """Whether every request gave the very logits."""
        return bool(self.requests) and all(request.equal for request in self.requests)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def page_ids(self) -> dict[str, PageIds]:
        """Source against destination, by index space of the destination; host pages come from prefill's `full` ones."""
        found: dict[str, PageIds] = {}
        for request in self.requests:
            for space, destination in request.destination_pages.items():
                source = request.source_pages["full" if space == "host" else space][: len(destination)]
                if destination:
                    so_far = found.get(space, PageIds(compared=0, different=0))
                    different = so_far.different + (source != destination[: len(source)])
                    found[space] = PageIds(compared=so_far.compared + 1, different=different)
        return found

    @computed_field  # type: ignore[prop-decorator]
    @property
    def scattered_requests(self) -> int:
        """Requests whose pages are not consecutive on at least one side."""
        return sum(map(is_scattered, self.requests))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def divergence(self) -> Divergence | None:
        """Average over all steps, of which every request has as many."""
        kl = [request.mean_kl for request in self.requests if request.mean_kl is not None]
        agreed = [request.top1_agreement for request in self.requests if request.top1_agreement is not None]
        if not kl or not agreed:
            return None
        return Divergence(mean_kl=sum(kl) / len(kl), top1_agreement=sum(agreed) / len(agreed))

    @property
    def good(self) -> bool:
        """Whether the demo has shown what it is there to show."""
        return self.equal and not self.pages_left


def is_scattered(request: RequestReport) -> bool:
    """Whether a request's pages are not consecutive in some space on some side."""
    tables = (*request.source_pages.values(), *request.destination_pages.values())
    return any(list(ids) != list(range(ids[0], ids[0] + len(ids))) for ids in tables if ids)


# ---------------------------------------------------------------------------------------------- the table


_Column = tuple[str, Callable[[RequestReport], str]]
"""Its title, and the cell of a request; that of all requests together is the cell of their sum."""


def print_report(report: DemoReport, console: Console) -> None:
    """Print the table and what it adds up to, in the width that the console has; the last line is the verdict."""
    together = _together(report.requests)
    _print_table(report, together, _columns(wide=console.width >= WIDE), console)
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
    stages = " + ".join(f"{len(layers)}" for layers in report.prefill_stages)
    lines = [
        _LEGEND,
        (
            f"Model {report.model}, random weights, {report.encoding} rows; prefill in {len(report.prefill_stages)} stage(s) "
            f"of {stages} layers; transport {report.transport}; device {report.device}; up to {report.most_in_flight} requests in "
            "flight at once."
        ),
        f"Page ids differed between the two sides in: {ids} requests; scattered pages in {report.scattered_requests}.",
    ]
    if report.hot_buffer is not None:
        lines += _sparse_notes(report, report.hot_buffer)
    if report.divergence is not None:
        lines.append(
            "Against the model with whole caches and unquantised rows: mean KL divergence "
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
