"""Small verified transfers, each in processes of its own: a transfer library that crashes is then a finding, not the end."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvbridge.core.children import module_command, signal_name
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, rate, warning

COMMAND = module_command("kvbridge", "bench-peer")
START_S = 60.0
TRIAL_S = 90.0
STOP_S = 5.0
LAST_WORDS = 300
HERE = "this host"
POOR_SHARE = 0.5


class Moved(FrozenModel):
    """A small verified transfer."""

    name: str
    """To whom: `this host`, or the peer's address."""
    transport: str
    problem: str = ""
    bytes_per_s: float = 0
    latency_s: float = 0
    """Of one operation."""
    operation_bytes: int = 0
    wire: str = ""
    wire_bytes_per_s: float = 0
    """0: not known."""


def move_here(transports: Sequence[str], flags: Sequence[str]) -> list[Moved]:
    """Move bytes between two processes of this host by each transport. `flags`: of `kvbridge bench-peer`, for both."""
    with _listener(flags) as (address, problem):
        if problem:
            return [Moved(name=HERE, transport=transport, problem=problem) for transport in transports]
        found = _run(address, transports, flags, name=HERE)
    # Which of several broke the process is not known: each is tried again between two processes that have no other.
    return found or [moved for transport in transports for moved in move_here([transport], flags)]


def move_to(address: str, transports: Sequence[str], flags: Sequence[str]) -> list[Moved]:
    """Move bytes by each transport to `kvbridge bench-peer --listen` at an address."""
    return _run(address, transports, flags, name=address) or [
        moved for transport in transports for moved in _run(address, [transport], flags, name=address)
    ]


def _run(address: str, transports: Sequence[str], flags: Sequence[str], *, name: str) -> list[Moved]:
    """Return what one process has measured; nothing when it broke down with several transports."""
    chosen = [word for transport in transports for word in ("--transport", transport)]
    try:
        ended = subprocess.run(
            [*COMMAND, address, "--brief", "--json", *chosen, *flags],
            capture_output=True,
            text=True,
            timeout=TRIAL_S * len(transports),
            check=False,
        )
        result = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        problem = f"it has not ended after {TRIAL_S:g} s"
    except ValueError:
        problem = _why(ended.returncode, ended.stderr)
    else:
        return [_moved(transport, result, name) for transport in transports]
    return [Moved(name=name, transport=transports[0], problem=problem)] if len(transports) == 1 else []


def _moved(transport: str, result: dict[str, Any], name: str) -> Moved:
    """Read what `kvbridge bench-peer --json` says of one transport."""
    rows = [each for each in result["measured"] if each["transport"] == transport]
    problem = result["problems"].get(transport, "")
    if problem or not rows:
        return Moved(name=name, transport=transport, problem=problem or "it was not tried")
    best = max(rows, key=lambda each: each["bytes_per_s"])
    return Moved(
        name=name,
        transport=transport,
        bytes_per_s=best["bytes_per_s"],
        operation_bytes=best["operation_bytes"],
        latency_s=min(each["latency_s"] for each in rows),
        wire=result["wire"],
        wire_bytes_per_s=result["wire_bytes_per_s"],
    )


@contextmanager
def _listener(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Have a listener on a free port of this host: (address, why there is none)."""
    command = [*COMMAND, "127.0.0.1:0", "--listen", "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else ""
        if line:
            yield json.loads(line)["address"], ""
        else:
            process.kill()
            yield "", _why(process.wait(STOP_S), process.communicate()[1] if ready else f"silent for {START_S:g} s")
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _why(code: int, said: str) -> str:
    words = " ".join(said.split())[-LAST_WORDS:]
    if code < 0:
        return f"its process was ended by {signal_name(-code)}: the library crashed here ({words or 'it said nothing'})"
    return words or f"it ended with {code} and said nothing"


def check_transfers(moved: Sequence[Moved]) -> Iterator[Finding]:
    """Bytes that were moved by each transport and compared."""
    for each in moved:
        subject = f"{each.transport} to {each.name}"
        if each.problem:
            yield breaks(
                f"{subject}: {each.problem}",
                "rooms that have no other transport in common with their peer fail in the same way",
                "kvbridge bench-peer --listen there and `kvbridge bench-peer ADDRESS` here show it alone; "
                f"or take {each.transport} out of transports.order",
                subject=subject,
            )
            continue
        known = each.wire_bytes_per_s > 0
        against = f", {each.bytes_per_s / each.wire_bytes_per_s:.0%} of {each.wire}" if known else ""
        text = (
            f"{subject}: {rate(each.bytes_per_s)} in operations of {each.operation_bytes:,} B{against}, "
            f"{each.latency_s * 1e6:.0f} us for one; verified"
        )
        if known and "memcpy" not in each.wire and each.bytes_per_s < POOR_SHARE * each.wire_bytes_per_s:
            yield warning(
                text,
                "less than half of what the card can: the transport uses another way than expected, or the way is shared",
                "kvbridge bench-peer ADDRESS for all sizes; UCX_PROTO_INFO=y or MC_LOG_LEVEL=INFO tell the way that is taken",
                subject=subject,
            )
        else:
            yield fine(text, subject=subject)
    if not moved:
        yield not_here("no bytes were moved", "told so (--no-transfer), or the role moves none")
