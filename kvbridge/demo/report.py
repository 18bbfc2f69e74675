"""What a demo found out: the comparison of logits, the verdict, and what a person reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from kvbridge.core.errors import InvalidInputError
from kvbridge.demo.messages import Computed, Decoded, Logits, Prefilled
from kvbridge.demo.prompts import Request

TEXT_WIDTH = 100


@dataclass(frozen=True)
class Comparison:
    """One request: what came over the bridge against the model alone. There is no tolerance; `reference` says why."""

    positions: int
    """All that were compared: the prompt's last one and every decoded one."""
    first_difference: int | None
    """The first position with another logit; 0 is the prompt's."""
    largest_difference: float
    """Of all logits of all positions."""


def compare(number: int, ours: Logits, alone: Logits) -> Comparison:
    """Compare the logits of one request. Not-a-number equals nothing.

    Raises InvalidInputError when the two sides have other shapes, or nothing in them.
    """
    if ours.shape != alone.shape or ours.ndim != 2 or not ours.size or ours.dtype != alone.dtype:
        raise InvalidInputError(
            f"request {number}: logits of {ours.dtype} {ours.shape} cannot be compared with {alone.dtype} {alone.shape}"
        )
    different = np.flatnonzero((ours != alone).any(axis=1))
    with np.errstate(invalid="ignore"):
        apart = np.where(ours == alone, 0.0, np.abs(ours - alone))
    return Comparison(len(ours), int(different[0]) if len(different) else None, float(apart.max()))


@dataclass(frozen=True)
class RequestReport:
    """One request that went over the bridge: what was planned, and what the three processes said of it."""

    planned: Request
    asked_s: float
    prefilled: Prefilled
    decoded: Decoded
    alone: Computed
    comparison: Comparison
    spared_bytes: int
    """What was not sent since decode held it."""

    @property
    def equal(self) -> bool:
        """Whether every logit is the model's own."""
        return self.comparison.first_difference is None

    @property
    def arrival_s(self) -> float:
        """From the router's request until decode had the cache and the first token."""
        return self.decoded.claimable_s - self.asked_s

    @property
    def after_prefill_s(self) -> float:
        """From the end of the prompt's computation until the request could be claimed: what the bridge added."""
        return max(0.0, self.decoded.claimable_s - self.prefilled.finished_s)

    @property
    def held_tokens(self) -> dict[str, int]:
        """What prefill and decode held of the prompt already, and what of that came back from host memory."""
        return {
            "computed_tokens": self.prefilled.computed_tokens,
            "computed_host_tokens": self.prefilled.host_tokens,
            "prefix_tokens": self.decoded.prefix_tokens,
            "prefix_host_tokens": self.decoded.host_tokens,
        }

    @property
    def arrived_bytes(self) -> dict[str, int]:
        """By component."""
        return {kind.value: amount.bytes for kind, amount in self.decoded.amounts.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the request as it is printed with `--json`."""
        planned, sparse = self.planned, self.decoded.sparse
        return {
            **{name: getattr(planned, name) for name in ("number", "conversation", "turn", "page_keys", "by_itself")},
            "prompt_tokens": planned.tokens,
            **self.held_tokens,
            "arrived_bytes": self.arrived_bytes,
            "spared_bytes": self.spared_bytes,
            "arrival_s": self.arrival_s,
            "after_prefill_s": self.after_prefill_s,
            "source_pages": self.prefilled.pages,
            "destination_pages": self.decoded.pages,
            "comparison": asdict(self.comparison),
            "share_of_rounding": self.alone.share_of_rounding,
            "sparse": sparse and asdict(sparse),
        }


@dataclass(frozen=True)
class DemoReport:
    """A whole demo."""

    reference: str
    """What the requests are compared with, in words."""
    transport: str
    device: str
    encoding: str
    prefill_stages: tuple[tuple[int, ...], ...]
    """The layers of each."""
    model: str
    weights: str
    versions: dict[str, str]
    requests: tuple[RequestReport, ...]
    most_in_flight: int
    turns: int
    """Of each conversation; 0: every prompt was one of its own."""
    keep_answers: bool
    host_tier: bool
    """Whether the device pools were too small for what is kept, and host memory was below them."""
    hot_rows: int
    """Of a request, in each C4 layer on the device; 0: decode kept whole caches."""
    pages_left: int
    """Pages that were not free again at the end; 0 unless there is a defect."""
    seconds: dict[str, float]

    @property
    def verdict(self) -> str:
        """The one line that says how it ended."""
        count, differing = len(self.requests), [each for each in self.requests if not each.equal]
        if count and not differing:
            return f"EQUAL: {count} of {count} requests gave the very logits of {self.reference}"
        first = f" ({_difference(differing[0])})" if differing else ""
        return f"DIFFERENT: {len(differing)} of {count} requests gave other logits than {self.reference}{first}"

    @property
    def reused(self) -> bool:
        """Whether both sides have made use of what they held, and of host memory, if there was anything to use."""
        held = ["prefix_tokens", "computed_tokens"]
        if self.host_tier:
            held += ["prefix_host_tokens", "computed_host_tokens"]
        return not self.turns or all(any(each.held_tokens[name] for each in self.requests) for name in held)

    @property
    def good(self) -> bool:
        """Whether the demo has shown what it is there to show."""
        equal = bool(self.requests) and all(each.equal for each in self.requests)
        return equal and self.reused and not self.pages_left

    def as_dict(self) -> dict[str, Any]:
        """Return the report as it is printed with `--json`."""
        requests = [each.as_dict() for each in self.requests]
        return {"verdict": self.verdict, "good": self.good, **vars(self), "requests": requests}


def _difference(request: RequestReport) -> str:
    found = request.comparison
    where = "the prompt's own logits" if found.first_difference == 0 else f"decode step {found.first_difference}"
    return f"request {request.planned.number}: first at {where}, logits by up to {found.largest_difference:.3g}"


# ---------------------------------------------------------------------------------------------- for a person


def print_report(report: DemoReport, console: Console) -> None:
    """Print a line a request and what the demo adds up to; the last line is the verdict."""
    for each in report.requests:
        console.print(Text(_line(each), style="" if each.equal else "bold red"), soft_wrap=True)
    console.print()
    for line in _notes(report):
        console.print(Text(line), width=min(console.width, TEXT_WIDTH))
    console.print()
    console.print(Text(report.verdict, style="bold green" if report.good else "bold red"), soft_wrap=True)


def _line(each: RequestReport) -> str:
    planned, turn = each.planned, ""
    if planned.turn:
        turn = (
            f"turn {planned.turn} of conversation {planned.conversation}{'' if planned.page_keys else ' without reuse'}, "
            f"{each.prefilled.computed_tokens:,} held by prefill, {each.decoded.prefix_tokens:,} by decode, "
        )
    return (
        f"{planned.number:3}: {planned.tokens:5,} tokens, {turn}{decimal(sum(each.arrived_bytes.values()))} sent, on decode "
        f"{each.after_prefill_s * 1000:.1f} ms after the prompt was computed, {'equal' if each.equal else 'DIFFERENT'}"
    )


def _notes(report: DemoReport) -> list[str]:
    stages = " + ".join(str(len(layers)) for layers in report.prefill_stages)
    different = sum(each.prefilled.pages["full"] != each.decoded.pages["full"] for each in report.requests)
    lines = [
        (
            f"Model {report.model}, random weights, {report.encoding} rows; prefill in stages of {stages} layers; transport "
            f"{report.transport}; device {report.device}; up to {report.most_in_flight} requests in flight at once; {different} of "
            f"{len(report.requests)} lay in other pages on decode than on prefill."
        )
    ]
    if report.turns:
        lines += _turn_notes(report)
    if report.hot_rows:
        lines.append(_sparse_note(report))
    if report.pages_left:
        lines.append(
            f"{report.pages_left} pages were not given back in the end: a defect of kvbridge, please report it."
        )
    lines.append(f"Time: {', '.join(f'{stage} {seconds:.1f} s' for stage, seconds in report.seconds.items())}.")
    return lines


def _turn_notes(report: DemoReport) -> list[str]:
    lines = []
    if report.host_tier:
        decode, prefill = (
            sum(each.held_tokens[name] for each in report.requests)
            for name in ("prefix_host_tokens", "computed_host_tokens")
        )
        lines.append(f"From host memory came {prefill:,} tokens of prefixes on prefill and {decode:,} on decode.")
    if not report.reused:
        what = "came back from host memory" if report.host_tier else "was reused"
        lines.append(f"Nothing {what} on one of the two sides: this run has not shown what it is there to show.")
    hits, colds = (
        [each for each in report.requests if each.planned.by_itself and each.planned.page_keys is keys]
        for keys in (True, False)
    )
    if hits and colds:
        hit_s, cold_s = (median(each.arrival_s for each in requests) for requests in (hits, colds))
        lines.append(
            f"What a hit is worth: a prompt of {hits[0].planned.tokens:,} tokens, by itself, had its first token on decode after "
            f"{cold_s * 1000:,.0f} ms without reuse and after {hit_s * 1000:,.0f} ms with it: {cold_s / hit_s:.1f} times as fast "
            f"(medians of {len(hits)} each, in turns)."
        )
    return lines


def _sparse_note(report: DemoReport) -> str:
    figures = [each.decoded.sparse for each in report.requests if each.decoded.sparse is not None]
    loaded, selected = sum(each.loaded for each in figures), sum(each.selected for each in figures)
    share = max(each.alone.share_of_rounding or 0.0 for each in report.requests)
    return (
        f"Sparse decode: {report.hot_rows} hot rows of up to {max(each.rows for each in figures):,} in each C4 layer; of "
        f"{selected:,} selected rows {1 - loaded / max(1, selected):.1%} were on the device, {loaded:,} came from host memory. "
        "In every step and C4 layer the sum over the selected rows is the dense model's over all rows, with at most "
        f"{share:.1e} of the difference that rounding explains."
    )
