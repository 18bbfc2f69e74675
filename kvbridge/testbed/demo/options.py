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
from kvbridge.testbed.demo.conversations import DEFAULT_CONVERSATIONS
from kvbridge.testbed.demo.lengths import DEFAULT_PROMPTS, DEFAULT_SPARSE_PROMPTS
from kvbridge.testbed.options import CommandOptions, Transport, count_of

DEFAULT_STEPS, DEFAULT_SPARSE_STEPS = 16, 256
DEFAULT_TURN_STEPS, DEFAULT_SPARSE_TURN_STEPS = 20, 68
DEFAULT_HOT_ROWS = 128
DEFAULT_CHUNK_TOKENS, DEFAULT_TURN_CHUNK_TOKENS = 512, 256
_PROMPTS_DEFAULT = (
    f"{DEFAULT_PROMPTS}; {DEFAULT_SPARSE_PROMPTS} longer ones with --sparse; {DEFAULT_CONVERSATIONS} with --turns"
)
_STEPS_DEFAULT = (
    f"{DEFAULT_STEPS}; {DEFAULT_SPARSE_STEPS} with --sparse; "
    f"{DEFAULT_TURN_STEPS} or {DEFAULT_SPARSE_TURN_STEPS} with --turns"
)
_CHUNK_DEFAULT = f"{DEFAULT_CHUNK_TOKENS}; {DEFAULT_TURN_CHUNK_TOKENS} with --turns"


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
    turns: Annotated[
        int | None,
        count_of("Conversations of so many turns, whose prefixes stay on both nodes.", most=50, default=False),
    ] = None
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
        count_of("Requests, or conversations; lengths are chosen at the edges.", most=500, default=_PROMPTS_DEFAULT),
    ] = None
    steps: Annotated[int | None, count_of("Tokens that are decoded for each.", most=10_000, default=_STEPS_DEFAULT)] = (
        None
    )
    chunk_tokens: Annotated[
        int | None, count_of("Prompt tokens that are computed and published at a time.", default=_CHUNK_DEFAULT)
    ] = None

    @property
    def chosen_transport(self) -> str:
        """The one that was asked for, or what serves the device best on one host."""
        return (self.transport or (Transport.MOONCAKE if self.device is Device.CPU else Transport.LOCAL)).value

    @property
    def prompt_count(self) -> int:
        """How many requests are made, or how many conversations."""
        if self.turns:
            return self.prompts or DEFAULT_CONVERSATIONS
        return self.prompts or (DEFAULT_SPARSE_PROMPTS if self.sparse else DEFAULT_PROMPTS)

    @property
    def step_count(self) -> int:
        """How many tokens are decoded for each."""
        if self.turns:
            return self.steps or (DEFAULT_SPARSE_TURN_STEPS if self.sparse else DEFAULT_TURN_STEPS)
        return self.steps or (DEFAULT_SPARSE_STEPS if self.sparse else DEFAULT_STEPS)

    @property
    def chunk_size(self) -> int:
        """How many prompt tokens are computed at a time."""
        return self.chunk_tokens or (DEFAULT_TURN_CHUNK_TOKENS if self.turns else DEFAULT_CHUNK_TOKENS)
