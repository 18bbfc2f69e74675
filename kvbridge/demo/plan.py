"""The plan of a demo: its options, and the model, the requests and the daemons that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Option

from kvbridge.cli.local_cluster import Cluster, daemon_config, plan_cluster
from kvbridge.config.pools import DeviceKind
from kvbridge.config.transports import TransportName
from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, Encoding, ModelGeometry
from kvbridge.core.geometry.costs import SparseSettings
from kvbridge.core.geometry.models import geometry_from_config
from kvbridge.core.geometry.pages import most_window_pages, pages_needed
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.layout import native_dtype_bytes, read_hf_config

MODEL_TYPE, REVISION = "deepseek_v4", "seed 0"
IN_FLIGHT = 4
CHUNK_TOKENS = 256
"""Prompt tokens that are computed and published at a time. A page is one chunk, so each process computes the same bits for it."""
LIBRARY_TOP_K = 512
"""Default of transformers for a config.json without a value."""
LONG_S = 3600.0
"""Limit of every wait for a room: none may end a room before the demo has used it."""
CHECKPOINTS = 2
"""Most checkpoints of a request on prefill: at its last page's end, and where it left a known prefix."""

TOKEN_COUNT = 256
"""A token is a byte of UTF-8."""
LENGTHS = (259, 3, 128, 1024, 257, 1, 127, 2047, 4, 129, 258, 511, 2, 255, 513, 66)
"""Moving a cache goes wrong at edges: an incomplete block of 4 or of 128 tokens, a last page of 256 tokens with one, two or three
of them, a prompt as long as the window. The first few lengths are spread over all kinds of edges already."""
SPARSE_LENGTHS = (2049, 4099, 3070, 2560)
"""Much longer than the hot buffer, with every remainder by 4 and last pages of 0, 1 and 3 tokens."""
SYSTEM_TOKENS, SPARSE_SYSTEM_TOKENS = 600, 1700
"""Two pages (or six) and a part of one: a shared system prompt then ends inside a page."""
_REMAINDERS = (3, 129, 0, 255, 1, 127, 4, 128, 2)
"""Prompts of turns modulo a page: every place where a block of 4 or of 128 tokens, or the page itself, ends or nearly does."""
_LEAST_NEW_TOKENS, _PAGE_TOKENS = 40, 256
_STRIDE = 97
"""Prompts begin at different places of the text."""

Text = tuple[int, ...]
"""Token ids."""


class RowEncoding(StrEnum):
    """Encoding of rows."""

    NATIVE = Encoding.NATIVE.value
    FP8_V4 = Encoding.FP8_V4.value


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The options of `kvbridge demo`."""

    sparse: Annotated[bool, Option("--sparse", help="Decode with a hot buffer; C4 rows stay in the host pool.")] = False
    device: Annotated[DeviceKind, Option(help="Device of models and device pools; cuda means cuda:0.")] = DeviceKind.CPU
    transport: Annotated[
        TransportName | None,
        Option(help="The only transport that both sides may use.", show_default="mooncake; local on a GPU"),
    ] = None
    prefill_pp: Annotated[int, Option(min=1, metavar="N", help="Pipeline stages of prefill.")] = 2
    hf_config: Annotated[
        Path | None, Option(metavar="FILE", help="A DeepSeek-V4 config.json, small enough for this machine.")
    ] = None
    encoding: Annotated[
        RowEncoding, Option(help="native: the model's own numbers; fp8_v4: as DeepSeek-V4 is served.")
    ] = RowEncoding.NATIVE
    turns: Annotated[
        int, Option(min=0, max=50, metavar="N", help="Conversations of N turns; both nodes cache prefixes.")
    ] = 0
    prompts: Annotated[
        int | None, Option(min=1, max=500, metavar="N", help="Requests (default: 16; sparse: 4), or conversations (3).")
    ] = None
    steps: Annotated[
        int | None, Option(min=1, max=10_000, metavar="N", help="Tokens decoded for each (default: 16; sparse: 70).")
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print the report as JSON, and nothing else.")] = False


class Request(NamedTuple):
    """One request of the demo. Numbers begin with 1; 0 means none."""

    number: int
    tokens: int
    """Length of the whole prompt."""
    new: Text
    """The part of the prompt behind the request `previous` and its answer."""
    conversation: int = 0
    turn: int = 0
    previous: int = 0
    """The request that this one continues."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that follows from the options. Each engine process gets a copy."""

    options: DemoOptions
    facts: dict[str, Any]
    """The model's config.json."""
    model: str
    dtype: str
    """Torch's name of the dtype of the computation."""
    device: str
    transport: str
    geometry: ModelGeometry
    steps: int
    requests: list[Request]
    hot_buffer: SparseSettings | None

    @property
    def batches(self) -> list[list[Request]]:
        """The requests that are in flight together: a turn, or a part of one."""

        def batch(request: Request) -> tuple[int, int]:
            return request.turn, ((request.conversation or request.number) - 1) // IN_FLIGHT

        return [list(requests) for _, requests in groupby(self.requests, batch)]


def make_plan(options: DemoOptions) -> Plan:
    """Raises ConfigError or InvalidInputError for options that contradict one another or the model."""
    facts = _read_model(options.hf_config)
    model = "tiny_deepseek_v4" if options.hf_config is None else options.hf_config.stem
    encoding, dtype_bytes = Encoding(options.encoding.value), native_dtype_bytes(facts)
    geometry = geometry_from_config(facts, encoding=encoding, native_dtype_bytes=dtype_bytes, name=model)
    if options.prefill_pp > geometry.layer_count:
        raise InvalidInputError(f"--prefill-pp {options.prefill_pp}: {model} has only {geometry.layer_count} layers")
    steps = options.steps or (70 if options.sparse else 16)
    requests = _requests(options, steps, int(facts.get("max_position_embeddings", 1 << 20)) - steps)
    on_cpu = options.device is DeviceKind.CPU
    return Plan(
        options=options,
        facts=facts,
        model=model,
        dtype=str(facts.get("dtype") or facts.get("torch_dtype") or "float32"),
        device="cpu" if on_cpu else f"{options.device}:0",
        transport=(options.transport or (TransportName.MOONCAKE if on_cpu else TransportName.LOCAL)).value,
        geometry=geometry,
        steps=steps,
        requests=requests,
        hot_buffer=_hot_buffer(facts, geometry, requests, steps) if options.sparse else None,
    )


def _read_model(file: Path | None) -> dict[str, Any]:
    if file is None:
        packed = resources.files("kvbridge").joinpath("engine/adapters/tiny_deepseek_v4.json")
        with resources.as_file(packed) as path:
            return read_hf_config(path)
    try:
        facts = read_hf_config(file)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.hf_config", "--hf-config")) from error
    if facts.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{file}: the demo runs model_type '{MODEL_TYPE}', got {facts.get('model_type')!r}")
    if int(facts.get("vocab_size", TOKEN_COUNT)) < TOKEN_COUNT:
        raise ConfigError(f"{file}: vocab_size must be at least {TOKEN_COUNT}: tokens are bytes")
    return facts


def _hot_buffer(facts: dict[str, Any], geometry: ModelGeometry, requests: list[Request], steps: int) -> SparseSettings:
    """Return the smallest hot buffer that serves the model: rows then give way to others in nearly every step."""
    if not any(component.kind is ComponentKind.C4_KV for component in geometry.components):
        raise InvalidInputError("--sparse: the model has no compressed_sparse_attention layer")
    component = geometry.component(ComponentKind.C4_KV)
    top_k = int(facts.get("index_topk", LIBRARY_TOP_K))
    hot_rows = -(-top_k // component.slots_per_page) * component.slots_per_page
    most_tokens = max(request.tokens for request in requests) + steps
    settings = SparseSettings(max_requests=IN_FLIGHT, hot_rows=hot_rows, top_k=top_k, max_tokens=most_tokens)
    settings.check_component(component)
    return settings


def _requests(options: DemoOptions, steps: int, most_tokens: int) -> list[Request]:
    """Return single prompts, which come again with other text behind the end of the list; or conversations, interleaved by turns.

    Every other conversation begins with the same system prompt. Each prompt of a turn, or every fifth answer, ends at an edge.
    """
    count = options.prompts or (3 if options.turns else 4 if options.sparse else 16)
    if not options.turns:
        listed = SPARSE_LENGTHS if options.sparse else LENGTHS
        lengths = [tokens for tokens in listed if tokens <= most_tokens]
        if not lengths or (options.sparse and len(lengths) < len(listed)):
            raise InvalidInputError(f"need prompts of up to {max(listed)} tokens, the model takes {most_tokens}")
        numbered = enumerate(islice(cycle(lengths), count), start=1)
        return [Request(number, tokens, prose(tokens, number * _STRIDE)) for number, tokens in numbered]
    if options.encoding is not RowEncoding.NATIVE:
        raise InvalidInputError(
            f"--turns with {options.encoding} rows: prefill would go on from quantised rows, the model alone from its own "
            "numbers; leave --encoding out"
        )
    system_tokens, made = SPARSE_SYSTEM_TOKENS if options.sparse else SYSTEM_TOKENS, list[Request]()
    for number in range(1, count * options.turns + 1):
        turn, conversation, previous = (number - 1) // count + 1, (number - 1) % count + 1, max(0, number - count)
        begin = Text() if previous else prose(system_tokens, 0 if conversation % 2 else number * _STRIDE + 1)
        begun = made[previous - 1].tokens + steps if previous else system_tokens
        ending = _REMAINDERS[number % len(_REMAINDERS)] if number % 5 else -steps
        least = begun + _LEAST_NEW_TOKENS
        tokens = least + (ending - least) % _PAGE_TOKENS
        new = begin + prose(tokens - begun, number * _STRIDE)
        made.append(Request(number, tokens, new, conversation, turn, previous))
    if (longest := max(request.tokens for request in made)) > most_tokens:
        raise InvalidInputError(f"--turns {options.turns}: prompts of {longest} tokens, the model takes {most_tokens}")
    return made


def prose(tokens: int, offset: int) -> Text:
    """Return a number of tokens of the prose that comes with kvbridge, going round at its end."""
    text = resources.files("kvbridge").joinpath("engine/adapters/prompts.txt").read_bytes()
    return tuple(text[(offset + index) % len(text)] for index in range(tokens))


def make_cluster(plan: Plan, folder: Path) -> Cluster:
    """Return the daemons of a demo, not started. The folder's name makes their names unique.

    Both nodes have room for the longest prompt as often as requests are in flight, and once more for each conversation, whose last
    turn is to stay. Prefill has as many pages again, which the demo holds.
    """
    options, most_tokens = plan.options, max(request.tokens for request in plan.requests)
    count = IN_FLIGHT + len({request.conversation for request in plan.requests})
    host = frozenset({ComponentKind.C4_KV} & {component.kind for component in plan.geometry.components})
    needed = pages_needed(plan.geometry, tokens=most_tokens + plan.steps, prompt_tokens=most_tokens, host=host)
    pages = {space.value: max(1, count * each) for space, each in needed.items() if space is not IndexSpace.HOST}
    twice = {space: 2 * each for space, each in pages.items()}
    common: dict[str, Any] = {
        "model": {"hf_config": str(folder / f"{plan.model}.json"), "encoding": options.encoding.value},
        "transport": plan.transport,
        "timeouts": dict.fromkeys(("begin_s", "offer_s", "room_s", "claim_s"), LONG_S) | {"shutdown_rooms_s": 3.0},
    }
    if options.turns:
        twice["swa"] += CHECKPOINTS * len(plan.requests) * most_window_pages(plan.geometry)
        identity = {"model_name": plan.model, "model_revision": REVISION}
        common["tier"] = {"enabled": True, "generated": False, **identity}
    ranks = [{"pp": stage, "tp": 0, "device": plan.device} for stage in range(options.prefill_pp)]
    # As many as full ones: bootstrap counts with that, since it does not know which components live on the host.
    host_pool = {"components": sorted(host), "pages": pages["full"] if host else 0}
    return plan_cluster(
        folder,
        bootstrap={"timeouts": {"ticket_s": LONG_S, "room_keep_s": 2 * LONG_S}},
        prefill=daemon_config(
            **common,
            instance=f"{folder.name}-prefill",
            pools={"device": twice},
            parallelism={"pp_size": options.prefill_pp, "ranks": ranks},
        ),
        decode=daemon_config(
            **common,
            instance=f"{folder.name}-decode",
            pools={"device": pages, "host": host_pool},
            parallelism={"ranks": ranks[:1]},
        ),
        ends_with_us=True,
    )
