"""One demo: what a user chooses, and the model and the requests that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbridge.config.pools import DeviceKind
from kvbridge.config.transports import TransportName
from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, Encoding, ModelGeometry
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.geometry.models import geometry_from_config
from kvbridge.daemon.model import native_dtype_bytes, read_hf_config
from kvbridge.demo.prompts import TOKEN_COUNT, Request, conversations, single_prompts

MODEL_TYPE = "deepseek_v4"
IN_FLIGHT = 4
"""Requests at once."""
CHUNK_TOKENS, TURN_CHUNK_TOKENS = 300, 256
"""Prompt tokens that are computed and published at a time. Chunks of turns end where pages do, so that a page has the same bits
whoever computed it."""
LIBRARY_TOP_K = 512
"""What transformers takes when a config.json does not say."""


class RowEncoding(StrEnum):
    """How rows travel and are kept."""

    NATIVE = Encoding.NATIVE.value
    FP8_V4 = Encoding.FP8_V4.value


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `kvbridge demo`; each field is annotated with its own. The engine processes get the whole."""

    sparse: Annotated[
        bool, typer.Option("--sparse", help="Decode with a hot buffer; the C4 cache stays in the host pool.")
    ] = False
    device: Annotated[
        DeviceKind, typer.Option(help="Where the models compute and the device pools are: cuda means cuda:0.")
    ] = DeviceKind.CPU
    transport: Annotated[
        TransportName | None,
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
        int, typer.Option(min=0, max=50, metavar="N", help="Conversations of N turns; both nodes keep prefixes.")
    ] = 0
    host_tier: Annotated[
        bool, typer.Option("--host-tier", help="With --turns: small device pools; prefixes return from host memory.")
    ] = False
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="With --turns: decode keeps pages of answers, too.")
    ] = False
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, max=500, metavar="N", help="Requests, or conversations.", show_default="16; sparse: 4, turns: 3"
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=10_000, metavar="N", help="Tokens that are decoded for each.", show_default="16; sparse: 70"
        ),
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy configurations, logs and the report there.")
    ] = None

    @property
    def chosen_transport(self) -> TransportName:
        """The transport that was asked for, or the one that serves the device best on one host."""
        return self.transport or (TransportName.MOONCAKE if self.device is DeviceKind.CPU else TransportName.LOCAL)

    @property
    def step_count(self) -> int:
        """How many tokens are decoded for each request."""
        return self.steps or (70 if self.sparse else 16)

    @property
    def torch_device(self) -> str:
        """The device as torch and the daemons name it."""
        return "cpu" if self.device is DeviceKind.CPU else f"{self.device}:0"

    @property
    def chunk_tokens(self) -> int:
        """How many tokens of a prompt are computed at a time."""
        return TURN_CHUNK_TOKENS if self.turns else CHUNK_TOKENS

    @property
    def reference(self) -> str:
        """What the requests are compared with, in words."""
        rows = "" if self.encoding is RowEncoding.NATIVE else f" with {self.encoding} rows"
        return f"the model alone{rows}{', attending to the selected ones' if self.sparse else ''}"

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The model's config.json. Raises ConfigError for a file that describes no model of the demo."""
        if self.hf_config is None:
            packed = resources.files("kvbridge").joinpath("engine/adapters/tiny_deepseek_v4.json")
            with resources.as_file(packed) as file:
                return read_hf_config(file)
        try:
            facts = read_hf_config(self.hf_config)
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.hf_config", "--hf-config")) from error
        if facts.get("model_type") != MODEL_TYPE:
            raise ConfigError(
                f"{self.hf_config}: the demo runs model_type '{MODEL_TYPE}', got {facts.get('model_type')!r}"
            )
        if int(facts.get("vocab_size", TOKEN_COUNT)) < TOKEN_COUNT:
            raise ConfigError(f"{self.hf_config}: vocab_size must be at least {TOKEN_COUNT}: tokens are bytes")
        return facts

    @property
    def model_name(self) -> str:
        """What the model is called."""
        return "tiny_deepseek_v4" if self.hf_config is None else self.hf_config.stem

    @property
    def dtype(self) -> str:
        """What the model computes in, as torch names it."""
        return str(self.facts.get("dtype") or self.facts.get("torch_dtype") or "float32")

    @cached_property
    def geometry(self) -> ModelGeometry:
        """The geometry that both nodes serve. Raises ConfigError or InvalidInputError for a model that has none."""
        return geometry_from_config(
            self.facts,
            encoding=Encoding(self.encoding.value),
            native_dtype_bytes=native_dtype_bytes(self.facts),
            name=self.model_name,
        )

    @cached_property
    def requests(self) -> list[Request]:
        """What is asked. Raises InvalidInputError for options that contradict one another or the model."""
        for given, name in ((self.host_tier, "--host-tier"), (self.keep_answers, "--keep-answers")):
            if given and not self.turns:
                raise InvalidInputError(f"{name} is about later turns; say how many with --turns")
        if self.prefill_pp > self.geometry.layer_count:
            raise InvalidInputError(
                f"--prefill-pp {self.prefill_pp}: {self.model_name} has only {self.geometry.layer_count} layers"
            )
        most_tokens = int(self.facts.get("max_position_embeddings", 1 << 20)) - self.step_count
        if not self.turns:
            count = self.prompts or (4 if self.sparse else 16)
            return single_prompts(count, sparse=self.sparse, most_tokens=most_tokens)
        if self.encoding is not RowEncoding.NATIVE:
            raise InvalidInputError(
                f"--turns with {self.encoding} rows: prefill would go on from quantised rows, the model alone from its own "
                "numbers; leave --encoding out"
            )
        made = conversations(self.prompts or 3, self.turns, steps=self.step_count, sparse=self.sparse)
        if (longest := max(request.tokens for request in made)) > most_tokens:
            raise InvalidInputError(f"--turns {self.turns}: prompts of {longest} tokens, the model takes {most_tokens}")
        return made

    @property
    def batches(self) -> Iterator[list[Request]]:
        """The requests that are in flight together: of one turn, and with `--host-tier` one.

        Of the first turn only two, so that a node can know the system prompt when it comes again.
        """
        turns = [list(group) for _, group in groupby(self.requests, lambda request: request.turn)]
        for turn in turns:
            size = 1 if self.host_tier else 2 if turn[0].turn == 1 else IN_FLIGHT
            yield from (turn[start : start + size] for start in range(0, len(turn), size))

    @cached_property
    def hot_buffer(self) -> SparseSettings | None:
        """The smallest hot buffer that serves the model, so that rows give way to others in nearly every step; None: not sparse.

        Raises InvalidInputError for a model that sparse decode does not suit.
        """
        if not self.sparse:
            return None
        if self.dtype != "float32":
            raise InvalidInputError(
                f"--sparse: the model computes in {self.dtype}; the bound on rounding between sparse and dense sums takes float32"
            )
        if not any(component.kind is ComponentKind.C4_KV for component in self.geometry.components):
            raise InvalidInputError("--sparse: the model has no compressed_sparse_attention layer")
        component = self.geometry.component(ComponentKind.C4_KV)
        top_k = int(self.facts.get("index_topk", LIBRARY_TOP_K))
        hot_rows = -(-top_k // component.slots_per_page) * component.slots_per_page
        most_tokens = max(request.tokens for request in self.requests) + self.step_count
        settings = SparseSettings(max_requests=IN_FLIGHT, hot_rows=hot_rows, top_k=top_k, max_tokens=most_tokens)
        settings.check_component(component)
        return settings
