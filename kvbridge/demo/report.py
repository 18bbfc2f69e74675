"""The comparison of logits, the verdict, and the report: a JSON object, which is also printed for a person."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from kvbridge.core.errors import InvalidInputError

TEXT_WIDTH = 100
Logits: TypeAlias = npt.NDArray[np.float32]
Report: TypeAlias = dict[str, Any]


def compare(number: int, ours: Logits, alone: Logits) -> dict[str, Any]:
    """Compare the logits of one request: [the prompt's last position and every decoded one, vocabulary].

    There is no tolerance; `reference` says why. Not-a-number equals nothing. Raises InvalidInputError when the two sides have other
    shapes, or nothing in them.
    """
    if ours.shape != alone.shape or ours.ndim != 2 or not ours.size or ours.dtype != alone.dtype:
        raise InvalidInputError(
            f"request {number}: logits of {ours.dtype} {ours.shape} cannot be compared with {alone.dtype} {alone.shape}"
        )
    different = np.flatnonzero((ours != alone).any(axis=1))
    with np.errstate(invalid="ignore"):
        apart = np.where(ours == alone, 0.0, np.abs(ours - alone))
    first = int(different[0]) if len(different) else None
    return {"positions": len(ours), "first_difference": first, "largest_difference": float(apart.max())}


def concluded(report: Report) -> Report:
    """Return a report that begins with its verdict, and whether the demo has shown what it is there to show."""
    good = bool(report["requests"]) and all(map(_equal, report["requests"]))
    return {"verdict": _verdict(report), "good": good and _reused(report) and not report["pages_left"], **report}


def _equal(request: Report) -> bool:
    return request["comparison"]["first_difference"] is None


def _reused(report: Report) -> bool:
    """Whether both sides have used what they held, and host memory, if there was anything to use."""
    names = ["prefix_tokens", "computed_tokens"] if report["turns"] else []
    if report["host_tier"]:
        names += ["prefix_host_tokens", "computed_host_tokens"]
    return all(any(request[name] for request in report["requests"]) for name in names)


def _verdict(report: Report) -> str:
    requests, reference = report["requests"], report["reference"]
    differing = [request for request in requests if not _equal(request)]
    if requests and not differing:
        return f"EQUAL: {len(requests)} of {len(requests)} requests gave the very logits of {reference}"
    first = ""
    for request in differing[:1]:
        found = request["comparison"]
        at = found["first_difference"]
        where = f"decode step {at}" if at else "the prompt's own logits"
        first = f" (request {request['number']}: first at {where}, logits by up to {found['largest_difference']:.3g})"
    return f"DIFFERENT: {len(differing)} of {len(requests)} requests gave other logits than {reference}{first}"


# ---------------------------------------------------------------------------------------------- for a person


def print_report(report: Report, console: Console) -> None:
    """Print a line a request and what the demo adds up to; the last line is the verdict."""
    for request in report["requests"]:
        console.print(Text(_line(request), style="" if _equal(request) else "bold red"), soft_wrap=True)
    console.print()
    for line in _notes(report):
        console.print(Text(line), width=min(console.width, TEXT_WIDTH))
    console.print()
    console.print(Text(report["verdict"], style="bold green" if report["good"] else "bold red"), soft_wrap=True)


def _line(request: Report) -> str:
    turn = (
        f"turn {request['turn']} of conversation {request['conversation']}, {request['computed_tokens']:,} held by prefill, "
        f"{request['prefix_tokens']:,} by decode, "
    )
    return (
        f"{request['number']:3}: {request['prompt_tokens']:5,} tokens, {turn if request['turn'] else ''}"
        f"{decimal(sum(request['arrived_bytes'].values()))} sent, on decode {request['after_prefill_s'] * 1000:.1f} ms after the "
        f"prompt was computed, {'equal' if _equal(request) else 'DIFFERENT'}"
    )


def _notes(report: Report) -> list[str]:
    requests = report["requests"]
    stages = " + ".join(str(len(layers)) for layers in report["prefill_stages"])
    moved = sum(each["source_pages"]["full"] != each["destination_pages"]["full"] for each in requests)
    model = (
        f"Model {report['model']}, random weights, {report['encoding']} rows; prefill in stages of {stages} layers; transport "
        f"{report['transport']}; device {report['device']}; up to {report['most_in_flight']} requests in flight at once; "
        f"{moved} of {len(requests)} lay in other pages on decode than on prefill."
    )
    lines = [model]
    if report["host_tier"]:
        names = ("computed_host_tokens", "prefix_host_tokens")
        prefill, decode = (sum(each[name] for each in requests) for name in names)
        lines.append(f"From host memory came {prefill:,} tokens of prefixes on prefill and {decode:,} on decode.")
    if not _reused(report):
        what = "came back from host memory" if report["host_tier"] else "was reused"
        lines.append(f"Nothing {what} on one of the two sides: this run has not shown what it is there to show.")
    if report["hot_rows"]:
        lines.append(_sparse_note(report))
    if report["pages_left"]:
        lines.append(
            f"{report['pages_left']} pages were not given back in the end: a defect of kvbridge, please report it."
        )
    return [*lines, f"Time: {', '.join(f'{stage} {seconds:.1f} s' for stage, seconds in report['seconds'].items())}."]


def _sparse_note(report: Report) -> str:
    figures = [each["sparse"] for each in report["requests"]]
    loaded, selected = (sum(each[name] for each in figures) for name in ("loaded", "selected"))
    share = max(each["share_of_rounding"] for each in report["requests"])
    return (
        f"Sparse decode: {report['hot_rows']} hot rows of up to {max(each['rows'] for each in figures):,} in each C4 layer; of "
        f"{selected:,} selected rows {1 - loaded / max(1, selected):.1%} were on the device, {loaded:,} came from host memory. "
        "In every step and C4 layer the sum over the selected rows is the dense model's over all rows, with at most "
        f"{share:.1e} of the difference that rounding explains."
    )
