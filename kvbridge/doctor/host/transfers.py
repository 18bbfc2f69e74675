"""Small verified transfers, each in processes of its own: a transfer library that crashes is then a finding, not the end.

Owns: the processes of `kvbridge bench-peer`, and their limits. Must not know: how bytes are moved.
"""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvbridge.core.children import module_command, signal_name
from kvbridge.doctor.facts import Moved

COMMAND = module_command("kvbridge", "bench-peer")
START_S = 60.0
TRIAL_S = 90.0
STOP_S = 5.0
LAST_WORDS = 300
HERE = "this host"


def move_here(transports: Sequence[str], flags: Sequence[str]) -> list[Moved]:
    """Move bytes between two processes of this host by each transport. `flags`: of `kvbridge bench-peer`, for both."""
    with _listener(flags) as (address, problem):
        if problem:
            return [Moved(name=HERE, transport=transport, problem=problem) for transport in transports]
        found = _run(address, transports, flags, name=HERE)
    return found or [_alone(transport, flags) for transport in transports]


def move_to(address: str, transports: Sequence[str], flags: Sequence[str]) -> list[Moved]:
    """Move bytes by each transport to `kvbridge bench-peer --listen` at an address."""
    return _run(address, transports, flags, name=address) or [
        moved for transport in transports for moved in _run(address, [transport], flags, name=address)
    ]


def _alone(transport: str, flags: Sequence[str]) -> Moved:
    """One transport between two processes that have no other."""
    with _listener(flags) as (address, problem):
        if problem:
            return Moved(name=HERE, transport=transport, problem=problem)
        return _run(address, [transport], flags, name=HERE)[0]


def _run(address: str, transports: Sequence[str], flags: Sequence[str], *, name: str) -> list[Moved]:
    """What one process has measured; nothing when it broke down and which of several transports broke it is not known."""
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
    """What `kvbridge bench-peer --json` says of one transport."""
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
    """A listener on a free port of this host: (address, why there is none)."""
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
        _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
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
