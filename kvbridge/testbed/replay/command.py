"""`kvbridge replay`: a request trace over real daemons on this machine, every byte compared.

Owns: the command, its files and exit codes. Must not know: how it is done.
"""

from __future__ import annotations

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.cli.options import with_options
from kvbridge.cli.pictures import require_plots
from kvbridge.core.errors import BridgeError, UnsupportedError
from kvbridge.testbed.command import Complaints
from kvbridge.testbed.options import LIBRARIES
from kvbridge.testbed.replay.options import ReplayOptions
from kvbridge.testbed.replay.plot import draw
from kvbridge.testbed.replay.report import Ending, ReplayReport, print_report
from kvbridge.testbed.replay.run import Replay

complaints = Complaints("replay")


@with_options(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay a request trace through real daemons and compare every byte.

    Starts bootstrap, a prefill daemon, a decode daemon and an engine process on
    each side. The engines compute nothing: prefill writes bytes that say where
    they belong, decode checks all of them.

    Exit codes: 0: every request served, no byte wrong; 1: not so, or something
    failed; 2: wrong options or trace; 130: interrupted, with a report of the part.
    """
    _check_files(options)
    complaints.require(LIBRARIES[options.transport])
    report = _run(options)
    written = _write(report, options)
    if options.as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, Console())
    if report.ending is Ending.INTERRUPTED:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(0 if report.good and written else EXIT_FAILED)


def _check_files(options: ReplayOptions) -> None:
    """End with the exit code for wrong options before a long run would find out."""
    for name, file in (("--report", options.report_file), ("--plot", options.plot_file)):
        if file is not None and not file.parent.is_dir():
            complaints.refuse(f"{name} {file}: there is no directory {file.parent}")
    if options.plot_file is not None:
        try:
            require_plots()
        except UnsupportedError as error:
            complaints.refuse(str(error))


def _run(options: ReplayOptions) -> ReplayReport:
    """Run it; whatever it came to is in the report."""
    with complaints.prepared(Replay, options) as replay:
        return replay.report(*_ending(replay))


def _ending(prepared: Replay) -> tuple[Ending, str]:
    """Run to an end of any kind; what has been measured until then is kept."""
    try:
        prepared.run()
    except KeyboardInterrupt:
        complaints.say("interrupted; ending every process")
        return Ending.INTERRUPTED, "interrupted"
    except SystemExit as ended:
        complaints.say("told to end; ending every process")
        return Ending.INTERRUPTED, f"ended by a signal (exit code {ended.code})"
    except BridgeError as error:
        return Ending.BROKEN, str(error)
    return Ending.COMPLETED, ""


def _write(report: ReplayReport, options: ReplayOptions) -> bool:
    """Write what was asked for; False when a file could not be written."""
    try:
        if options.report_file is not None:
            options.report_file.write_text(report.model_dump_json(indent=1) + "\n")
        if options.plot_file is not None:
            draw(report, options.plot_file)
    except OSError as error:
        complaints.say(f"could not be written: {error}")
        return False
    return True
