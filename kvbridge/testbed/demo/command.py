"""`kvbridge demo`: a real model over real daemons on this machine, compared logit by logit with the model alone.

Owns: the command, its options and exit codes. Must not know: how it is done.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbridge.cli.daemons import EXIT_FAILED
from kvbridge.cli.interrupts import EXIT_INTERRUPTED
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.geometry.components import Encoding
from kvbridge.kernels.cuda.runtime import reason_without_device
from kvbridge.testbed.command import Complaints, Transport, with_options
from kvbridge.testbed.demo.lengths import DEFAULT_PROMPTS, DEFAULT_SPARSE_PROMPTS
from kvbridge.testbed.demo.plan import DEFAULT_HOT_ROWS, DemoOptions
from kvbridge.testbed.demo.report import DemoReport, print_report
from kvbridge.testbed.demo.run import Demo
from kvbridge.testbed.progress import ShownProgress
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


class DemoDevice(StrEnum):
    """Where the models compute."""

    CPU = "cpu"
    CUDA = "cuda"


class DemoEncoding(StrEnum):
    """How rows travel and are kept."""

    NATIVE = "native"
    FP8_V4 = "fp8_v4"


complaints = Complaints("demo")
_TRANSPORTS = {DemoDevice.CPU: Transport.MOONCAKE, DemoDevice.CUDA: Transport.LOCAL}
"""What each device is best served by on one host."""


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """The options of `kvbridge demo`, as they were given."""

    sparse: Annotated[
        bool, typer.Option("--sparse", help="Decode with a hot buffer; the C4 cache stays in the host pool.")
    ] = False
    hot_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Hot buffer: rows of a request in each layer.",
            show_default=str(DEFAULT_HOT_ROWS),
        ),
    ] = None
    device: Annotated[
        DemoDevice, typer.Option(help="Where the models compute and the device pools are: cuda means cuda:0.")
    ] = DemoDevice.CPU
    transport: Annotated[
        Transport | None,
        typer.Option(help="The only transport that both sides may use.", show_default="mooncake; local on a GPU"),
    ] = None
    prefill_pp: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Pipeline stages of prefill; they need not be equal."),
    ] = 2
    hf_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A DeepSeek-V4 config.json, small enough for this machine."),
    ] = None
    encoding: Annotated[
        DemoEncoding, typer.Option(help="native: the model's own numbers; fp8_v4: as DeepSeek-V4 is served.")
    ] = DemoEncoding.NATIVE
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=500,
            metavar="N",
            help="Requests; lengths are chosen at the edges.",
            show_default=f"{DEFAULT_PROMPTS}; {DEFAULT_SPARSE_PROMPTS} longer ones with --sparse",
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            metavar="N",
            help="Tokens that are decoded for each.",
            show_default=f"{DEFAULT_STEPS}; {DEFAULT_SPARSE_STEPS} with --sparse",
        ),
    ] = None
    chunk_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Prompt tokens that are computed and published at a time."),
    ] = 512
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False
    keep_logs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy configurations, logs and logits of all processes there."),
    ] = None
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=1, metavar="SECONDS", help="Give up when an engine says nothing for so long."),
    ] = 120.0

    def options(self) -> DemoOptions:
        """Return what follows from them; refuses those that contradict each other or this machine."""
        if self.hot_rows is not None and not self.sparse:
            complaints.refuse("--hot-rows is the size of the hot buffer, which only --sparse has")
        if self.device is DemoDevice.CUDA and (reason := reason_without_device()):
            complaints.refuse(f"--device cuda: {reason}")
        complaints.check_keep_logs(self.keep_logs)
        return DemoOptions(
            transport=(self.transport or _TRANSPORTS[self.device]).value,
            prefill_pp=self.prefill_pp,
            hf_config=self.hf_config,
            encoding=Encoding(self.encoding.value),
            prompts=self.prompts or (DEFAULT_SPARSE_PROMPTS if self.sparse else DEFAULT_PROMPTS),
            steps=self.steps or (DEFAULT_SPARSE_STEPS if self.sparse else DEFAULT_STEPS),
            chunk_tokens=self.chunk_tokens,
            patience_s=self.patience_s,
            keep_logs=self.keep_logs,
            sparse=self.sparse,
            hot_rows=self.hot_rows or DEFAULT_HOT_ROWS,
            device=self.device.value,
        )


@with_options(DemoArguments)
def demo(arguments: DemoArguments) -> None:
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
    report = _run(arguments.options(), Console(stderr=True))
    if arguments.as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_report(report, Console())
    raise typer.Exit(0 if report.good else EXIT_FAILED)


def _run(options: DemoOptions, errors: Console) -> DemoReport:
    """Run it, or end with one clear message and the right exit code."""
    if importlib.util.find_spec("transformers") is None:
        complaints.say(
            "the demo runs Hugging Face's DeepSeek-V4, and transformers is not installed: pip install 'kvbridge[transformers]'"
        )
        raise typer.Exit(EXIT_FAILED)
    try:
        with (
            terminated_like_interrupted(),
            ShownProgress(errors) as progress,
            _prepared(options, progress) as prepared,
        ):
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


def _prepared(options: DemoOptions, progress: ShownProgress) -> Demo:
    """Return the demo, or end with the exit code for wrong options."""
    try:
        return Demo(options, progress)
    except InvalidInputError as error:
        complaints.refuse(str(error))


def system_library_hint(text: str) -> str:
    """Return what to install when a message is about a missing system library, else nothing."""
    packages = [package for library, package in SYSTEM_LIBRARIES.items() if library in text]
    return f" (on Debian and Ubuntu: apt install {' '.join(packages)})" if packages else ""
