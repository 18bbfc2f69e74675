"""What a user may choose for a demo.

Owns: every option, its limits, its default and its help. Must not know: what follows from them (`plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.core.geometry.components import Encoding
from kvbridge.testbed.demo.lengths import DEFAULT_PROMPTS, DEFAULT_SPARSE_PROMPTS
from kvbridge.testbed.options import CommandOptions, Transport, count_of

DEFAULT_STEPS, DEFAULT_SPARSE_STEPS = 16, 256
DEFAULT_HOT_ROWS = 128
_PROMPTS_DEFAULT = f"{DEFAULT_PROMPTS}; {DEFAULT_SPARSE_PROMPTS} longer ones with --sparse"
_STEPS_DEFAULT = f"{DEFAULT_STEPS}; {DEFAULT_SPARSE_STEPS} with --sparse"


class Device(StrEnum):
    """Where the models compute."""

    CPU = "cpu"
    CUDA = "cuda"


class RowEncoding(StrEnum):
    """How rows travel and are kept."""

    NATIVE = Encoding.NATIVE.value
    FP8_V4 = Encoding.FP8_V4.value


@dataclass(frozen=True, kw_only=True)
class DemoOptions(CommandOptions):
    """The options of `kvbridge demo`. Properties say what holds where one was left out."""

    sparse: Annotated[
        bool, typer.Option("--sparse", help="Decode with a hot buffer; the C4 cache stays in the host pool.")
    ] = False
    hot_rows: Annotated[
        int | None, count_of("Hot buffer: rows of a request in each layer.", default=str(DEFAULT_HOT_ROWS))
    ] = None
    device: Annotated[
        Device, typer.Option(help="Where the models compute and the device pools are: cuda means cuda:0.")
    ] = Device.CPU
    transport: Annotated[
        Transport | None,
        typer.Option(help="The only transport that both sides may use.", show_default="mooncake; local on a GPU"),
    ] = None
    prefill_pp: Annotated[int, count_of("Pipeline stages of prefill; they need not be equal.")] = 2
    hf_config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A DeepSeek-V4 config.json, small enough for this machine."),
    ] = None
    encoding: Annotated[
        RowEncoding, typer.Option(help="native: the model's own numbers; fp8_v4: as DeepSeek-V4 is served.")
    ] = RowEncoding.NATIVE
    prompts: Annotated[
        int | None, count_of("Requests; lengths are chosen at the edges.", most=500, default=_PROMPTS_DEFAULT)
    ] = None
    steps: Annotated[int | None, count_of("Tokens that are decoded for each.", most=10_000, default=_STEPS_DEFAULT)] = (
        None
    )
    chunk_tokens: Annotated[int, count_of("Prompt tokens that are computed and published at a time.")] = 512

    @property
    def chosen_transport(self) -> str:
        """The one that was asked for, or what serves the device best on one host."""
        return (self.transport or (Transport.MOONCAKE if self.device is Device.CPU else Transport.LOCAL)).value

    @property
    def prompt_count(self) -> int:
        """How many requests are made."""
        return self.prompts or (DEFAULT_SPARSE_PROMPTS if self.sparse else DEFAULT_PROMPTS)

    @property
    def step_count(self) -> int:
        """How many tokens are decoded for each."""
        return self.steps or (DEFAULT_SPARSE_STEPS if self.sparse else DEFAULT_STEPS)
