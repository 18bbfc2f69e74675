"""What a user may choose for a demo. Properties say what holds where an option was left out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.core.geometry.components import Encoding


class Transport(StrEnum):
    """What the two daemons may use."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"
    LOCAL = "local"


class Device(StrEnum):
    """Where the models compute."""

    CPU = "cpu"
    CUDA = "cuda"


class RowEncoding(StrEnum):
    """How rows travel and are kept."""

    NATIVE = Encoding.NATIVE.value
    FP8_V4 = Encoding.FP8_V4.value


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `kvbridge demo`; each field is annotated with its own."""

    sparse: Annotated[
        bool, typer.Option("--sparse", help="Decode with a hot buffer; the C4 cache stays in the host pool.")
    ] = False
    device: Annotated[
        Device, typer.Option(help="Where the models compute and the device pools are: cuda means cuda:0.")
    ] = Device.CPU
    transport: Annotated[
        Transport | None,
        typer.Option(help="The only transport that both sides may use.", show_default="mooncake; local on a GPU"),
    ] = None
    prefill_pp: Annotated[int, typer.Option(min=1, metavar="N", help="Pipeline stages of prefill.")] = 2
    hf_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A DeepSeek-V4 config.json, small enough for this machine.")
    ] = None
    encoding: Annotated[
        RowEncoding, typer.Option(help="native: the model's own numbers; fp8_v4: as DeepSeek-V4 is served.")
    ] = RowEncoding.NATIVE
    turns: Annotated[
        int,
        typer.Option(
            min=0, max=50, metavar="N", help="Conversations of so many turns, whose prefixes stay on both nodes."
        ),
    ] = 0
    host_tier: Annotated[
        bool,
        typer.Option(
            "--host-tier",
            help="With --turns: device pools too small for them, so that prefixes come back from host memory.",
        ),
    ] = False
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="With --turns: decode keeps pages of answers, too.")
    ] = False
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=500,
            metavar="N",
            help="Requests, or conversations.",
            show_default="16; 4 with --sparse or --turns",
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10_000,
            metavar="N",
            help="Tokens that are decoded for each.",
            show_default="16; 96 with --sparse; 20 or 68 with --turns",
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy configurations, logs and the report there.")
    ] = None

    @property
    def chosen_transport(self) -> Transport:
        """The transport that was asked for, or the one that serves the device best on one host."""
        return self.transport or (Transport.MOONCAKE if self.device is Device.CPU else Transport.LOCAL)

    @property
    def prompt_count(self) -> int:
        """How many requests are made, or how many conversations."""
        return self.prompts or (4 if self.turns or self.sparse else 16)

    @property
    def step_count(self) -> int:
        """How many tokens are decoded for each."""
        dense, sparse = (20, 68) if self.turns else (16, 96)
        return self.steps or (sparse if self.sparse else dense)

    @property
    def torch_device(self) -> str:
        """The device as torch and the daemons name it."""
        return "cpu" if self.device is Device.CPU else f"{self.device}:0"
