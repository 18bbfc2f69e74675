"""`kvbridge demo`: a real model over real daemons on this machine, compared logit by logit with the model alone.

Owns: the command, its options and exit codes. Must not know: how it is done.
"""

from __future__ import annotations

import importlib.util
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_CONFIG
from kvbridge.cli.daemons import EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.geometry.components import Encoding
from kvbridge.kernels.cuda.runtime import reason_without_device
from kvbridge.testbed.demo.lengths import DEFAULT_PROMPTS, DEFAULT_SPARSE_PROMPTS
from kvbridge.testbed.demo.plan import DEFAULT_HOT_ROWS, DemoOptions
from kvbridge.testbed.demo.report import DemoReport, print_report
from kvbridge.testbed.demo.run import Demo
from kvbridge.testbed.progress import ShownProgress, shown_progress
from kvbridge.testbed.signals import terminated_like_interrupted

SYSTEM_LIBRARIES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
    "libgomp.so": "libgomp1",
    "libstdc++.so": "libstdc++6",
}
"""The Debian package of each shared library that the wheels expect to find."""


DEFAULT_STEPS, DEFAULT_SPARSE_STEPS = 16, 256


class DemoTransport(StrEnum):
    """What the two daemons may use."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"
    LOCAL = "local"


class DemoDevice(StrEnum):
    """Where the models compute."""

    CPU = "cpu"
    CUDA = "cuda"


class DemoEncoding(StrEnum):
    """How rows travel and are kept."""

    NATIVE = "native"
    FP8_V4 = "fp8_v4"


_TRANSPORTS = {DemoDevice.CPU: DemoTransport.MOONCAKE, DemoDevice.CUDA: DemoTransport.LOCAL}
"""What each device is best served by on one host."""


def demo(  # noqa: PLR0913, PLR0917 - one parameter an option
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Decode with a hot buffer; the C4 cache stays in the host pool.")
    ] = False,
    hot_rows: Annotated[
        int | None,
        typer.Option(
            "--hot-rows",
            min=1,
            metavar="N",
            help="Hot buffer: rows of a request in each layer.",
            show_default=str(DEFAULT_HOT_ROWS),
        ),
    ] = None,
    device: Annotated[
        DemoDevice, typer.Option(help="Where the models compute and the device pools are: cuda means cuda:0.")
    ] = DemoDevice.CPU,
    transport: Annotated[
        DemoTransport | None,
        typer.Option(help="The only transport that both sides may use.", show_default="mooncake; local on a GPU"),
    ] = None,
    prefill_pp: Annotated[
        int,
        typer.Option("--prefill-pp", min=1, metavar="N", help="Pipeline stages of prefill; they need not be equal."),
    ] = 2,
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", metavar="FILE", help="A DeepSeek-V4 config.json, small enough for this machine."),
    ] = None,
    encoding: Annotated[
        DemoEncoding, typer.Option(help="native: the model's own numbers; fp8_v4: as DeepSeek-V4 is served.")
    ] = (DemoEncoding.NATIVE),
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=500,
            metavar="N",
            help="Requests; lengths are chosen at the edges.",
            show_default=f"{DEFAULT_PROMPTS}; {DEFAULT_SPARSE_PROMPTS} longer ones with --sparse",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            metavar="N",
            help="Tokens that are decoded for each.",
            show_default=f"{DEFAULT_STEPS}; {DEFAULT_SPARSE_STEPS} with --sparse",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            "--chunk-tokens", min=1, metavar="N", help="Prompt tokens that are computed and published at a time."
        ),
    ] = 512,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False,
    keep_logs: Annotated[
        Path | None,
        typer.Option("--keep-logs", metavar="DIR", help="Copy configurations, logs and logits of all processes there."),
    ] = None,
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=1, metavar="SECONDS", help="Give up when an engine says nothing for so long."),
    ] = 120.0,
) -> None:
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
    errors = Console(stderr=True)
    if hot_rows is not None and not sparse:
        _refuse("--hot-rows is the size of the hot buffer, which only --sparse has")
    if device is DemoDevice.CUDA and (reason := reason_without_device()):
        _refuse(f"--device cuda: {reason}")
    options = DemoOptions(
        transport=(transport or _TRANSPORTS[device]).value,
        prefill_pp=prefill_pp,
        hf_config=hf_config,
        encoding=Encoding(encoding.value),
        prompts=prompts or (DEFAULT_SPARSE_PROMPTS if sparse else DEFAULT_PROMPTS),
        steps=steps or (DEFAULT_SPARSE_STEPS if sparse else DEFAULT_STEPS),
        chunk_tokens=chunk_tokens,
        patience_s=patience_s,
        keep_logs=keep_logs,
        sparse=sparse,
        hot_rows=hot_rows or DEFAULT_HOT_ROWS,
        device=device.value,
    )
    report = _run(options, errors)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, Console())
    raise typer.Exit(0 if report.good else EXIT_FAILED)


def _run(options: DemoOptions, errors: Console) -> DemoReport:
    """Run it, or end with one clear message and the right exit code."""
    if importlib.util.find_spec("transformers") is None:
        _complain(
            "the demo runs Hugging Face's DeepSeek-V4, and transformers is not installed: pip install 'kvbridge[transformers]'"
        )
        raise typer.Exit(EXIT_FAILED)
    try:
        with (
            terminated_like_interrupted(),
            shown_progress(errors) as progress,
            _prepared(options, progress) as prepared,
        ):
            return prepared.run()
    except KeyboardInterrupt:
        _complain("interrupted; every process has been ended")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except SystemExit:
        _complain("told to end; every process has been ended")
        raise
    except BridgeError as error:
        _complain(f"{error}{system_library_hint(str(error))}")
        if options.keep_logs is not None:
            _complain(f"all logs are in {options.keep_logs}")
        raise typer.Exit(EXIT_FAILED) from error


def _prepared(options: DemoOptions, progress: ShownProgress) -> Demo:
    """Return the demo, or end with the exit code for wrong options."""
    kept = options.keep_logs
    if kept is not None and kept.exists() and not (kept.is_dir() and not any(kept.iterdir())):
        _refuse(f"--keep-logs {kept}: there is something already; name an empty or a new directory")
    try:
        return Demo(options, progress)
    except InvalidInputError as error:
        _refuse(str(error))


def system_library_hint(text: str) -> str:
    """Return what to install when a message is about a missing system library, else nothing."""
    packages = [package for library, package in SYSTEM_LIBRARIES.items() if library in text]
    return f" (on Debian and Ubuntu: apt install {' '.join(packages)})" if packages else ""


def _refuse(text: str) -> NoReturn:
    """Wrong options."""
    _complain(text)
    raise typer.Exit(EXIT_CONFIG)


def _complain(text: str) -> None:
    typer.echo(f"kvbridge demo: {text}", err=True)
