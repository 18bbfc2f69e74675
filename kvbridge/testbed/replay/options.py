"""What a user may choose for a replay.

Owns: every option, its limits, its default and its help. Must not know: what follows from them (`plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.core.geometry.presets import PRESETS
from kvbridge.core.plan.digests import DigestKind
from kvbridge.testbed.options import CommandOptions, Transport, count_of


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(CommandOptions):
    """The options of `kvbridge replay`."""

    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids.")
    ]
    count: Annotated[int, count_of("Requests to replay; 0: all of the trace.", least=0)] = 0
    start: Annotated[int, count_of("Requests of the trace to skip first.", least=0)] = 0
    speed: Annotated[
        float,
        typer.Option(
            min=0, metavar="FACTOR", help="1: as the trace says; 10: ten times as fast; 0: as fast as admission lets."
        ),
    ] = 1.0
    model: Annotated[str, typer.Option(metavar="NAME", help=f"Whose geometry: {', '.join(PRESETS)}.")] = (
        "deepseek-v4-flash"
    )
    transport: Annotated[Transport, typer.Option(help="The only transport that both sides may use.")] = (
        Transport.MOONCAKE
    )
    prefill_pp: Annotated[int, count_of("Prefill stages.", most=64)] = 1
    prefill_tp: Annotated[int, count_of("Ranks a stage.", most=64)] = 1
    decode_pp: Annotated[int, count_of("Decode stages.", most=64)] = 1
    decode_tp: Annotated[int, count_of("Ranks a stage.", most=64)] = 1
    chunk_tokens: Annotated[int, count_of("Prompt tokens written and published at a time.")] = 4096
    max_in_flight: Annotated[int, count_of("Requests asked for or admitted at once.", most=4096)] = 4
    pool_tokens: Annotated[
        int, count_of("Tokens that fit a node's pools; 0: twice what can be in flight.", least=0)
    ] = 0
    decode_ms_per_token: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Decode holds a room for output_length x this / speed.")
    ] = 0.0
    retry_for_s: Annotated[
        float, typer.Option("--retry-for", min=0, metavar="SECONDS", help="Ask again for so long after a refusal.")
    ] = 60.0
    prefixes: Annotated[
        bool, typer.Option("--prefixes/--no-prefixes", help="Prompts that share `hash_ids` share pages, on both nodes.")
    ] = True
    host_tokens: Annotated[
        int, count_of("Tokens that a node's host memory keeps below its device pools; 0: none there.", least=0)
    ] = 0
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Decode keeps answers, too. No prompt of a trace has one.")
    ] = False
    digest: Annotated[
        DigestKind | None, typer.Option(help="integrity.digest of the decode daemon, if not its default.")
    ] = None
    report_file: Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the report.")] = None
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw latencies and pools; needs the extra 'plot'."),
    ] = None
