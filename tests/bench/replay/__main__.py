"""Replay a request trace through real daemons and compare every byte: python -m tests.bench.replay --trace FILE

Starts bootstrap, a prefill daemon, a decode daemon and an engine process on each side. The engines compute nothing: prefill writes
bytes that say where they belong, decode checks all of them.

Exit codes: 0: every request served, no byte wrong; 1: not so, or something failed; 2: wrong options or trace; 130: interrupted,
with a report of the part.
"""

from __future__ import annotations

import json
from typing import Any

import typer

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.cli.options import with_options
from kvbridge.cli.signals import terminated_like_interrupted
from kvbridge.core.errors import BridgeError, InvalidInputError
from tests.bench.replay.plan import ReplayOptions
from tests.bench.replay.run import Replay


def told(text: str) -> None:
    """Show a line while the replay runs."""
    typer.echo(text, err=True)


@with_options(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay a request trace through real daemons and compare every byte."""
    if options.report_file is not None and not options.report_file.parent.is_dir():
        told(f"--report {options.report_file}: there is no directory {options.report_file.parent}")
        raise typer.Exit(EXIT_CONFIG)
    try:
        prepared = Replay(options, told)
    except InvalidInputError as error:
        told(str(error))
        raise typer.Exit(EXIT_CONFIG) from error
    with terminated_like_interrupted(), prepared:
        report = prepared.report(*ending(prepared))
    if options.report_file is not None:
        options.report_file.write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(json.dumps(report, indent=1) if options.as_json else "\n".join(lines(report)))
    raise typer.Exit(EXIT_INTERRUPTED if report["ending"] == "interrupted" else 0 if report["good"] else EXIT_FAILED)


def ending(prepared: Replay) -> tuple[str, str]:
    """Run to an end of any kind; what has been measured until then is kept."""
    try:
        prepared.run()
    except KeyboardInterrupt:
        told("interrupted; ending every process")
        return "interrupted", "interrupted"
    except SystemExit as ended:
        told("told to end; ending every process")
        return "interrupted", f"ended by a signal (exit code {ended.code})"
    except BridgeError as error:
        return "broken", str(error)
    return "completed", ""


def lines(report: dict[str, Any]) -> list[str]:
    """The report for a person; the last line is the verdict."""
    found = [
        f"{name:18} {each['bytes']:>18,} bytes {each['operations']:>10,} operations"
        for name, each in report["amounts"].items()
    ]
    for name, each in report["phases"].items():
        percentiles = "".join(f"{1e3 * each[key]:>12,.1f}" for key in ("p50_s", "p90_s", "p99_s", "max_s"))
        found.append(f"{name:18}{percentiles}  ms (p50, p90, p99, most)")
    tokens = ", ".join(f"{name} {count:,}" for name, count in report["found_tokens"].items())
    found.append(f"tokens of prompts that were held: {tokens}; of {report['arrived_tokens']:,}")
    found += [f"WRONG {row}" for row in report["wrong_rows"]]
    found += [
        f"request {each['number']} (room {each['room'] or 'none'}): {each['reason']}" for each in report["unserved"]
    ]
    return [*found, *([report["problem"]] if report["problem"] else []), report["verdict"]]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(replay)

if __name__ == "__main__":
    app()
