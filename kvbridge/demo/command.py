"""`kvbridge demo`: the command and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import time
from typing import Any, NoReturn

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.cli.options import with_options
from kvbridge.cli.signals import terminated_like_interrupted
from kvbridge.config.pools import DeviceKind
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.demo.options import DemoOptions
from kvbridge.demo.report import print_report
from kvbridge.demo.run import Demo
from kvbridge.kernels.cuda.runtime import reason_without_device


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
    if options.device is DeviceKind.CUDA and (reason := reason_without_device()):
        _end(f"--device cuda: {reason}", EXIT_CONFIG)
    for library in ("torch", "transformers"):
        if not importlib.util.find_spec(library):
            _end(
                f"not installed: {library}; in a checkout of kvbridge, pip install '.[demo]' brings all that this needs"
            )
    kept = options.keep_logs
    if kept is not None and kept.exists() and not (kept.is_dir() and not any(kept.iterdir())):
        _end(f"--keep-logs {kept}: there is something already; name an empty or a new directory", EXIT_CONFIG)
    report = _run(options)
    if options.as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(report, Console())
    raise typer.Exit(0 if report["good"] else EXIT_FAILED)


def _run(options: DemoOptions) -> dict[str, Any]:
    """Run it, or end with one clear message and the right exit code."""
    begun_s = time.monotonic()
    try:
        with terminated_like_interrupted():
            try:
                prepared = Demo(
                    options, lambda text: typer.echo(f"{time.monotonic() - begun_s:6.1f} s  {text}", err=True)
                )
            except InvalidInputError as error:
                _end(str(error), EXIT_CONFIG)
            with prepared:
                return prepared.run()
    except KeyboardInterrupt:
        _end("interrupted; every process has been ended", EXIT_INTERRUPTED)
    except SystemExit:
        typer.echo("kvbridge demo: told to end; every process has been ended", err=True)
        raise
    except BridgeError as error:
        kept = f"\nkvbridge demo: all logs are in {options.keep_logs}" if options.keep_logs is not None else ""
        _end(f"{error}{kept}")


def _end(text: str, code: int = EXIT_FAILED) -> NoReturn:
    typer.echo(f"kvbridge demo: {text}", err=True)
    raise typer.Exit(code)
