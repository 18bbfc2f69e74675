"""`kvbridge demo`: the command and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import time
from typing import NoReturn

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.cli.options import with_options
from kvbridge.cli.signals import terminated_like_interrupted
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.demo.options import DemoOptions, Device, Transport
from kvbridge.demo.report import DemoReport, print_report
from kvbridge.demo.run import Demo
from kvbridge.kernels.cuda.runtime import reason_without_device

LIBRARIES = {Transport.MOONCAKE: ("mooncake",), Transport.NIXL: ("nixl_cu12", "nixl_cu13"), Transport.LOCAL: ()}
"""The packages of which each transport needs one."""
SYSTEM_LIBRARIES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
    "libgomp.so": "libgomp1",
    "libstdc++.so": "libstdc++6",
}
"""The Debian package of each shared library that the wheels expect to find."""


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
        _refuse(f"--device cuda: {reason}")
    for needed in (("torch",), ("transformers",), LIBRARIES[options.chosen_transport]):
        if needed and not any(map(importlib.util.find_spec, needed)):
            _say(
                f"not installed: {needed[0]}; in a checkout of kvbridge, pip install '.[demo]' brings all that this needs"
            )
            raise typer.Exit(EXIT_FAILED)
    kept = options.keep_logs
    if kept is not None and kept.exists() and not (kept.is_dir() and not any(kept.iterdir())):
        _refuse(f"--keep-logs {kept}: there is something already; name an empty or a new directory")
    report = _run(options)
    if options.as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_report(report, Console())
    raise typer.Exit(0 if report.good else EXIT_FAILED)


def _run(options: DemoOptions) -> DemoReport:
    """Run it, or end with one clear message and the right exit code."""
    begun_s = time.monotonic()
    try:
        with terminated_like_interrupted():
            try:
                prepared = Demo(
                    options, lambda text: typer.echo(f"{time.monotonic() - begun_s:6.1f} s  {text}", err=True)
                )
            except InvalidInputError as error:
                _refuse(str(error))
            with prepared:
                return prepared.run()
    except KeyboardInterrupt:
        _say("interrupted; every process has been ended")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except SystemExit:
        _say("told to end; every process has been ended")
        raise
    except BridgeError as error:
        packages = [package for library, package in SYSTEM_LIBRARIES.items() if library in str(error)]
        hint = f" (on Debian and Ubuntu: apt install {' '.join(packages)})" if packages else ""
        _say(f"{error}{hint}")
        if options.keep_logs is not None:
            _say(f"all logs are in {options.keep_logs}")
        raise typer.Exit(EXIT_FAILED) from error


def _say(text: str) -> None:
    typer.echo(f"kvbridge demo: {text}", err=True)


def _refuse(text: str) -> NoReturn:
    """End with the exit code for wrong options."""
    _say(text)
    raise typer.Exit(EXIT_CONFIG)
