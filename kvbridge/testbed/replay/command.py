"""`kvbridge replay`: a request trace over real daemons on this machine, every byte compared.

Owns: the command, its options, its files and exit codes. Must not know: how it is done.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_CONFIG
from kvbridge.cli.daemons import EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.core.errors import BridgeError, InvalidInputError, UnsupportedError
from kvbridge.core.geometry.presets import PRESETS
from kvbridge.core.plan.digests import DigestKind
from kvbridge.testbed.progress import ShownProgress, shown_progress
from kvbridge.testbed.replay.plan import ReplayOptions
from kvbridge.testbed.replay.plot import draw, require_plots
from kvbridge.testbed.replay.report import Ending, ReplayReport, print_report
from kvbridge.testbed.replay.run import Replay
from kvbridge.testbed.signals import terminated_like_interrupted


class ReplayTransport(StrEnum):
    """What the two daemons may use."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"
    LOCAL = "local"


def replay(  # noqa: PLR0913, PLR0917 - one parameter an option
    trace: Annotated[
        Path,
        typer.Option(
            "--trace", metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids."
        ),
    ],
    count: Annotated[int, typer.Option(min=0, metavar="N", help="Requests to replay; 0: all of the trace.")] = 0,
    start: Annotated[int, typer.Option(min=0, metavar="N", help="Requests of the trace to skip first.")] = 0,
    speed: Annotated[
        float,
        typer.Option(
            min=0, metavar="FACTOR", help="1: as the trace says; 10: ten times as fast; 0: as fast as admission lets."
        ),
    ] = 1.0,
    model: Annotated[
        str, typer.Option(metavar="NAME", help=f"Whose geometry: {', '.join(PRESETS)}.")
    ] = "deepseek-v4-flash",
    transport: Annotated[
        ReplayTransport, typer.Option(help="The only transport that both sides may use.")
    ] = ReplayTransport.MOONCAKE,
    prefill_pp: Annotated[int, typer.Option("--prefill-pp", min=1, max=64, metavar="N", help="Prefill stages.")] = 1,
    prefill_tp: Annotated[int, typer.Option("--prefill-tp", min=1, max=64, metavar="N", help="Ranks a stage.")] = 1,
    decode_pp: Annotated[int, typer.Option("--decode-pp", min=1, max=64, metavar="N", help="Decode stages.")] = 1,
    decode_tp: Annotated[int, typer.Option("--decode-tp", min=1, max=64, metavar="N", help="Ranks a stage.")] = 1,
    chunk_tokens: Annotated[
        int, typer.Option("--chunk-tokens", min=1, metavar="N", help="Prompt tokens written and published at a time.")
    ] = 4096,
    max_in_flight: Annotated[
        int,
        typer.Option("--max-in-flight", min=1, max=4096, metavar="N", help="Requests asked for or admitted at once."),
    ] = 4,
    pool_tokens: Annotated[
        int,
        typer.Option(
            "--pool-tokens", min=0, metavar="N", help="Tokens that fit a node's pools; 0: twice what can be in flight."
        ),
    ] = 0,
    decode_ms_per_token: Annotated[
        float,
        typer.Option(
            "--decode-ms-per-token", min=0, metavar="MS", help="Decode holds a room for output_length x this / speed."
        ),
    ] = 0.0,
    retry_for_s: Annotated[
        float, typer.Option("--retry-for", min=0, metavar="SECONDS", help="Ask again for so long after a refusal.")
    ] = 60.0,
    digest: Annotated[
        DigestKind | None, typer.Option(help="integrity.digest of the decode daemon, if not its default.")
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the report.")] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw latencies and pools; needs the extra 'plot'."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False,
    keep_logs: Annotated[
        Path | None,
        typer.Option("--keep-logs", metavar="DIR", help="Copy configurations and logs of all processes there."),
    ] = None,
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=1, metavar="SECONDS", help="Give up when no engine says anything for so long."),
    ] = 60.0,
) -> None:
    """Replay a request trace through real daemons and compare every byte.

    Starts bootstrap, a prefill daemon, a decode daemon and an engine process on
    each side. The engines compute nothing: prefill writes bytes that say where
    they belong, decode checks all of them.

    Exit codes: 0: every request served, no byte wrong; 1: not so, or something
    failed; 2: wrong options or trace; 130: interrupted, with a report of the part.
    """
    options = ReplayOptions(
        trace=trace,
        start=start,
        count=count,
        speed=speed,
        model=model,
        transport=transport.value,
        prefill_pp=prefill_pp,
        prefill_tp=prefill_tp,
        decode_pp=decode_pp,
        decode_tp=decode_tp,
        chunk_tokens=chunk_tokens,
        max_in_flight=max_in_flight,
        pool_tokens=pool_tokens,
        decode_ms_per_token=decode_ms_per_token,
        retry_for_s=retry_for_s,
        digest=digest.value if digest else "",
        patience_s=patience_s,
        keep_logs=keep_logs,
    )
    _check_files(report_file, plot_file, keep_logs)
    report = _run(options)
    written = _write(report, report_file, plot_file)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, Console())
    if report.ending is Ending.INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(0 if report.good and written else EXIT_FAILED)


def _check_files(report_file: Path | None, plot_file: Path | None, keep_logs: Path | None) -> None:
    """End with the exit code for wrong options before a long run would find out."""
    for name, file in (("--report", report_file), ("--plot", plot_file)):
        if file is not None and not file.parent.is_dir():
            _wrong(f"{name} {file}: there is no directory {file.parent}")
    if keep_logs is not None and keep_logs.exists() and not (keep_logs.is_dir() and not any(keep_logs.iterdir())):
        _wrong(f"--keep-logs {keep_logs}: there is something already; name an empty or a new directory")
    if plot_file is not None:
        try:
            require_plots()
        except UnsupportedError as error:
            _wrong(str(error))


def _run(options: ReplayOptions) -> ReplayReport:
    """Run it; whatever it came to is in the report."""
    with (
        terminated_like_interrupted(),
        shown_progress(Console(stderr=True)) as progress,
        _prepared(options, progress) as prepared,
    ):
        ending, problem = _ending(prepared)
        return prepared.report(ending, problem)


def _ending(prepared: Replay) -> tuple[Ending, str]:
    """Run to an end of any kind; what has been measured until then is kept."""
    try:
        prepared.run()
    except KeyboardInterrupt:
        _complain("interrupted; ending every process")
        return Ending.INTERRUPTED, "interrupted"
    except SystemExit as told:
        _complain("told to end; ending every process")
        return Ending.INTERRUPTED, f"ended by a signal (exit code {told.code})"
    except BridgeError as error:
        return Ending.BROKEN, str(error)
    return Ending.COMPLETED, ""


def _prepared(options: ReplayOptions, progress: ShownProgress) -> Replay:
    try:
        return Replay(options, progress)
    except InvalidInputError as error:
        _wrong(str(error))


def _write(report: ReplayReport, report_file: Path | None, plot_file: Path | None) -> bool:
    """Write what was asked for; False when a file could not be written."""
    try:
        if report_file is not None:
            report_file.write_text(report.model_dump_json(indent=1) + "\n")
        if plot_file is not None:
            draw(report, plot_file)
    except OSError as error:
        _complain(f"could not be written: {error}")
        return False
    return True


def _wrong(text: str) -> NoReturn:
    _complain(text)
    raise typer.Exit(EXIT_CONFIG)


def _complain(text: str) -> None:
    typer.echo(f"kvbridge replay: {text}", err=True)
