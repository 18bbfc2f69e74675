"""`kvbridge demo`: a real model over real daemons on this machine, compared logit by logit with the model alone.

Owns: the command and its exit codes. Must not know: how it is done.
"""

from __future__ import annotations

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.cli.options import with_options
from kvbridge.core.errors import BridgeError
from kvbridge.kernels.cuda.runtime import reason_without_device
from kvbridge.testbed.command import Complaints
from kvbridge.testbed.demo.options import DemoOptions, Device
from kvbridge.testbed.demo.report import DemoReport
from kvbridge.testbed.demo.report_table import print_report
from kvbridge.testbed.demo.run import Demo
from kvbridge.testbed.options import LIBRARIES, Transport

SYSTEM_LIBRARIES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
    "libgomp.so": "libgomp1",
    "libstdc++.so": "libstdc++6",
}
"""The Debian package of each shared library that the wheels expect to find."""

complaints = Complaints("demo")


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Prefill in one process, decode in another, and compare every logit.

    Starts bootstrap, a prefill daemon and a decode daemon, two engine processes
    with Hugging Face's DeepSeek-V4 (random weights), and a third process that
    runs the model alone. Needs no GPU and no network.

    With --sparse, decode keeps a small hot buffer of the C4 cache and fetches
    selected rows from the host pool. The model alone then sums over selected
    rows, too, and in every step that must be its dense sum but for rounding.

    Exit codes: 0: every logit of every request is equal; 1: not so, or something
    failed; 2: wrong options; 130: interrupted.
    """
    if options.device is Device.CUDA and (reason := reason_without_device()):
        complaints.refuse(f"--device cuda: {reason}")
    report = _run(options)
    if options.as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, Console())
    raise typer.Exit(0 if report.good else EXIT_FAILED)


def _run(options: DemoOptions) -> DemoReport:
    """Run it, or end with one clear message and the right exit code."""
    complaints.require(("transformers",), LIBRARIES[Transport(options.chosen_transport)])
    try:
        with complaints.prepared(Demo, options) as prepared:
            return prepared.run()
    except KeyboardInterrupt:
        complaints.say("interrupted; every process has been ended")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except SystemExit:
        complaints.say("told to end; every process has been ended")
        raise
    except BridgeError as error:
        complaints.say(f"{error}{system_library_hint(str(error))}")
        if options.keep_logs is not None:
            complaints.say(f"all logs are in {options.keep_logs}")
        raise typer.Exit(EXIT_FAILED) from error


def system_library_hint(text: str) -> str:
    """Return what to install when a message is about a missing system library, else nothing."""
    packages = [package for library, package in SYSTEM_LIBRARIES.items() if library in text]
    return f" (on Debian and Ubuntu: apt install {' '.join(packages)})" if packages else ""
