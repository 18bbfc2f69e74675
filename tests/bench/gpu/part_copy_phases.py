"""Where the time of a local transfer goes: until it is submitted, until the device begins, until its end is noticed.

Owns: the cases, and what is tried: other rests between two looks, shorter slices, more blocks of the copy kernel. What is moved is
what `part_transport` moves, in pages of 37,440 B scattered on both sides; that the bytes are right is its business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from kvbridge.kernels.cuda import runtime
from tests.bench.gpu.part_transport import (
    LEAD_S,
    WriterProcess,
    connect_to,
    device_target,
    disconnect_from,
    host_target,
    order_of,
    stripe_of,
)
from tests.bench.gpu.recorder import Recorder

CONTEXTS = (32_768, 131_072)
AS_A_WORKER = {"pause_s": -1.0, "slice_mib": 0, "times_blocks": 1}
TRIED: dict[str, dict[str, float]] = {
    "as it is": AS_A_WORKER,
    "looked after without a rest": AS_A_WORKER | {"pause_s": 0.0},
    "looked after every 0.1 ms": AS_A_WORKER | {"pause_s": 0.0001},
    "slices of 32 MiB": AS_A_WORKER | {"slice_mib": 32},
    "slices of 8 MiB": AS_A_WORKER | {"slice_mib": 8},
    "twice the blocks": AS_A_WORKER | {"times_blocks": 2},
    "four times the blocks": AS_A_WORKER | {"times_blocks": 4},
}
TURNS = 9
PHASES = ("submitted_s", "device_began_s", "device_ended_s", "device_busy_s")


def run(recorder: Recorder, *, quick: bool) -> None:
    """From one GPU and from two to the host, and over NVLink where there are two."""
    count, turns = runtime.device_count(), 3 if quick else TURNS
    with ExitStack() as stack:
        writers = [stack.enter_context(WriterProcess(device)) for device in range(min(2, count))]
        for writer in writers:
            writer.answer()
        with host_target() as (endpoint, mapping):
            for writer in writers:
                connect_to(writer, "host", endpoint, mapping.address)
            for group in sorted({1, len(writers)}):
                measure(recorder, writers[:group], "host", turns)
            for writer in writers:
                disconnect_from(writer, "host")
        where = 1 if count > 1 and runtime.can_reach(0, 1) else 0
        with device_target(where) as (endpoint, address):
            connect_to(writers[0], "device", endpoint, address)
            measure(recorder, writers[:1], f"cuda:{where}", turns)
            disconnect_from(writers[0], "device")


def measure(recorder: Recorder, writers: Sequence[WriterProcess], to: str, turns: int) -> None:
    """Every context, and everything that is tried, in turns."""
    for tokens in CONTEXTS:
        order = order_of(tokens)
        total = order["layers"] * order["pages"] * order["operation_bytes"]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in TRIED}
        copies = []
        for _ in range(turns + 1):
            copies.append(total / _together(writers, "copy", to=to, bytes=total // len(writers))["took_s"] / 1e9)
            for name, how in TRIED.items():
                target = "host" if to == "host" else "device"
                found[name].append(_together(writers, "phases", target=target, order=order, **how))
        for name, looks in found.items():
            of = {key: median(look[key] for look in looks[1:]) for key in looks[0]}
            recorder.case(
                to=to,
                gpus=len(writers),
                tokens=tokens,
                tried=name,
                bytes=total,
                submitted_s=of["submitted_s"],
                device_began_s=of["device_began_s"],
                late_s=of["late_s"],
                waited_s=of["waited_s"],
                slices=int(of["slices"]),
                device_gb_s=total / of["device_busy_s"] / 1e9,
                gb_s=total / of["took_s"] / 1e9,
                copy_gb_s=median(copies[1:]),
            )


def _together(writers: Sequence[WriterProcess], do: str, **arguments: Any) -> dict[str, float]:
    """Have all writers do something at once; each figure is that of the writer with the largest."""
    at_s = time.monotonic() + LEAD_S
    for number, writer in enumerate(writers):
        mine = dict(arguments)
        if "order" in mine:
            mine["order"] = stripe_of(mine["order"], number, len(writers))
        writer.tell(do, at_s=at_s, **mine)
    answers = [writer.answer() for writer in writers]
    took_s = max(answer["ended_s"] for answer in answers) - min(answer["begun_s"] for answer in answers)
    if do == "copy":
        return {"took_s": took_s}
    for answer in answers:
        answer["late_s"] = answer["ended_s"] - answer["begun_s"] - answer["device_ended_s"]
        answer["waited_s"] = answer["device_ended_s"] - answer["device_began_s"] - answer["device_busy_s"]
    figures = (*PHASES, "late_s", "waited_s", "slices")
    return {"took_s": took_s} | {key: max(answer[key] for answer in answers) for key in figures}
