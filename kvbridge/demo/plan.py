"""What a demo will run, decided before anything runs: prompts, sizes of pools, the configuration of the daemons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

from kvbridge.cli.local_cluster import ClusterSpec, NodeSpec
from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.geometry.huggingface import geometry_from_config
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import NO_HOST, most_window_pages, pages_needed
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.model import native_dtype_bytes, read_hf_config
from kvbridge.demo.messages import Job
from kvbridge.demo.options import DemoOptions, Device, RowEncoding
from kvbridge.demo.prompts import SPARSE_SYSTEM_TOKENS, SYSTEM_TOKENS, Request, conversations, single_prompts
from kvbridge.pool.memory.layout import stage_layers
from kvbridge.tier.keys import PrefixIdentity

MODEL_TYPE = "deepseek_v4"
LONG_S = 3600.0
REVISION = "seed 0"
"""Of the random weights."""
CHECKPOINTS = 2
"""Of windows and states that a request may leave on prefill: at its last page's end, and where it left a known prefix."""
IN_FLIGHT = 4
"""Requests at once."""
SERVED_BY_SMALL_POOLS = 1
"""Of the longest requests, those that fit at once with `--host-tier`."""
CHUNK_TOKENS, TURN_CHUNK_TOKENS = 300, 256
"""Prompt tokens that are computed and published at a time; those of turns end where pages do, so that a page has the same bits
whoever computed it."""
LIBRARY_TOP_K = 512
"""What transformers takes when a config.json does not say."""
RESERVED_STEPS = 64
"""Sparse decode reserves pages for so many steps, and asks for more as it goes on."""


@dataclass(frozen=True)
class DemoPlan:
    """Everything that follows from the options."""

    options: DemoOptions
    model_name: str
    model_facts: dict[str, Any]
    geometry: ModelGeometry
    requests: tuple[Request, ...]
    stages: tuple[tuple[int, ...], ...]
    sparse: SparseSettings | None

    @classmethod
    def of(cls, options: DemoOptions) -> Self:
        """Decide. Raises ConfigError or InvalidInputError for a model or a split that cannot be run."""
        facts, name = _model(options.hf_config)
        geometry = geometry_from_config(
            facts, encoding=Encoding(options.encoding.value), native_dtype_bytes=native_dtype_bytes(facts), name=name
        )
        most_tokens = int(facts.get("max_position_embeddings", 1 << 20)) - options.step_count
        if most_tokens < 1:
            raise InvalidInputError(f"{name}: max_position_embeddings leaves no room for {options.step_count} steps")
        if options.prefill_pp > geometry.layer_count:
            raise InvalidInputError(f"--prefill-pp {options.prefill_pp}: {name} has only {geometry.layer_count} layers")
        stages = tuple(
            stage_layers(geometry.layer_count, options.prefill_pp, stage) for stage in range(options.prefill_pp)
        )
        requests = _requests(options, most_tokens=most_tokens)
        longest = max(request.tokens for request in requests)
        sparse = _sparse_settings(facts, geometry, most_tokens=longest + options.step_count) if options.sparse else None
        return cls(options, name, facts, geometry, requests, stages, sparse)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of all prompts."""
        return tuple(request.tokens for request in self.requests)

    @property
    def identity(self) -> PrefixIdentity:
        """What the pages of this demo are pages of, as both nodes are told."""
        return PrefixIdentity(
            model=self.model_name,
            revision=REVISION,
            fingerprint=fingerprint(self.geometry),
            tokens_per_page=self.geometry.tokens_per_page,
        )

    def prefix_bytes(self, tokens: int) -> int:
        """Bytes of whole pages of a prompt, all growing components and layers together: what is not sent when decode holds it."""
        growing = [each for each in self.geometry.components if each.liveness is Liveness.GROWING]
        pages = tokens // self.geometry.tokens_per_page
        return pages * sum(component.page_bytes() * len(component.layers) for component in growing)

    @property
    def reserved_steps(self) -> int:
        """Steps that a request has pages for when it is admitted; in small pools there are none to be had later."""
        grows = self.sparse and not self.options.host_tier
        return min(self.options.step_count, RESERVED_STEPS) if grows else self.options.step_count

    @property
    def reference(self) -> str:
        """What the requests are compared with, in words."""
        rows = "" if self.options.encoding is RowEncoding.NATIVE else f" with {self.options.encoding} rows"
        return f"the model alone{rows}{', attending to the selected ones' if self.sparse else ''}"

    @property
    def prefill_only_tokens(self) -> int:
        """Length of the room that only prefill knows: as long as all of decode's pages, so that no full id can be the same."""
        return self._decode_pages(self._host_kinds())[IndexSpace.FULL.value] * self.geometry.tokens_per_page

    @property
    def hole_tokens(self) -> tuple[int, ...]:
        """Lengths of the rooms that are paired first: the long ones are given back, the short ones between them stay.

        They leave holes of half the pages that the longest prompt needs, and together they fill the pools of full pages: so
        the pools look as if they had been in use for a while, and long prompts get scattered pages.
        """
        page = self.geometry.tokens_per_page
        longest_pages = -(-max(self._largest()) // page)
        wanted_pages = sum(-(-tokens // page) for tokens in self._largest())
        hole_pages = -(-longest_pages // 2)
        holes = -(-wanted_pages // hole_pages)
        return (*([hole_pages * page, 1] * (holes - 1)), hole_pages * page)

    def job(self, prefill_runtime_dir: Path, decode_runtime_dir: Path) -> Job:
        """Return the job of the engine processes."""
        return Job(
            prefill_runtime_dir=prefill_runtime_dir,
            decode_runtime_dir=decode_runtime_dir,
            model=self.model_facts,
            model_name=self.model_name,
            encoding=Encoding(self.options.encoding.value),
            requests=len(self.requests),
            steps=self.options.step_count,
            chunk_tokens=TURN_CHUNK_TOKENS if self.options.turns else CHUNK_TOKENS,
            device=self.options.torch_device,
            sparse=self.sparse,
        )

    def model_file(self, folder: Path) -> Path:
        """Return where daemons find the model's config.json."""
        return folder / f"{self.model_name}.json"

    def cluster_spec(self, folder: Path) -> ClusterSpec:
        """Return the daemons to start in a folder. The demo holds rooms while it lasts, so limits that could end one are long."""
        long = dict.fromkeys(("begin_s", "offer_s", "room_s", "claim_s"), LONG_S)
        timeouts = {**long, "shutdown_rooms_s": 3.0, "shutdown_close_s": 3.0}
        host = self._host_kinds()
        decode_pages = self._decode_pages(host)
        # As many as full ones: bootstrap counts with that, since it does not know what lives on the host.
        host_pages = decode_pages["full"] + self._kept_pages(host)[IndexSpace.HOST]
        host_pool = {"components": sorted(host), "pages": host_pages if host else 0}
        answers, checkpoints = self.options.keep_answers, CHECKPOINTS * len(self.requests)
        decode_pages.pop(IndexSpace.HOST.value, None)
        return ClusterSpec(
            model={"hf_config": str(self.model_file(folder)), "encoding": self.options.encoding.value},
            transport=self.options.chosen_transport.value,
            prefill=NodeSpec(
                instance=f"{folder.name}-prefill",
                pp=self.options.prefill_pp,
                pools={"device": self._prefill_pages()},
                more={"timeouts": timeouts, **self._tier(NO_HOST, checkpoints), **self._ranks(self.options.prefill_pp)},
            ),
            decode=NodeSpec(
                instance=f"{folder.name}-decode",
                pools={"device": decode_pages, "host": host_pool},
                more={"timeouts": timeouts, **self._tier(host, 0, generated=answers), **self._ranks(1)},
            ),
            bootstrap={"timeouts": {"ticket_s": LONG_S, "room_keep_s": 2 * LONG_S}},
            ends_with_us=True,
        )

    def _tier(self, host: frozenset[ComponentKind], checkpoints: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - YAML
        """The section of prefixes that stay, where turns make use of it; `host`: components in the node's host pool anyway."""
        if not self.options.turns:
            return {}
        if self.options.host_tier:
            pages = checkpoints * most_window_pages(self.geometry)
            more["host"] = {"pages": self._kept_pages(host)[IndexSpace.FULL], "checkpoint_pages": pages}
        return {"tier": {"enabled": True, "model_name": self.model_name, "model_revision": REVISION, **more}}

    def _kept_pages(self, host: frozenset[ComponentKind]) -> Counter[IndexSpace]:
        """Pages of all that is ever said, with `--host-tier`: more than are kept, since conversations begin alike."""
        if not self.options.host_tier:
            return Counter()
        return self._demand([(tokens, tokens + self.options.step_count) for tokens in self.lengths], host)

    def _ranks(self, stages: int) -> dict[str, Any]:
        """Where the ranks of a node are, unless on the CPU: all of them on one device, with the models."""
        if self.options.device is Device.CPU:
            return {}
        ranks = [{"pp": stage, "tp": 0, "device": self.options.torch_device} for stage in range(stages)]
        return {"parallelism": {"pp_size": stages, "tp_size": 1, "ranks": ranks}}

    def _host_kinds(self) -> frozenset[ComponentKind]:
        kinds = {component.kind for component in self.geometry.components}
        return frozenset({ComponentKind.C4_KV} & kinds)

    def _prefill_pages(self) -> dict[str, int]:
        sizes = self._pool_sizes(
            [(tokens, tokens) for tokens in self._largest()], NO_HOST, always=self.prefill_only_tokens
        )
        if self.options.turns and IndexSpace.SWA in sizes:
            kept = CHECKPOINTS * (SERVED_BY_SMALL_POOLS if self.options.host_tier else len(self.requests))
            if self.options.host_tier:
                kept += SERVED_BY_SMALL_POOLS  # from which they go on
            sizes[IndexSpace.SWA.value] += kept * most_window_pages(self.geometry)
        return sizes

    def _decode_pages(self, host: frozenset[ComponentKind]) -> dict[str, int]:
        return self._pool_sizes([(tokens, tokens + self.options.step_count) for tokens in self._largest()], host)

    def _pool_sizes(
        self, served: list[tuple[int, int]], host: frozenset[ComponentKind], *, always: int = 0
    ) -> dict[str, int]:
        """Return the pages for what is there at once: first the rooms that make holes, then half of them and the served."""
        holes = [(tokens, tokens) for tokens in self.hole_tokens]
        before, after = self._demand(holes, host), self._demand([*holes[1::2], *served], host)
        held = self._demand([(always, always)] if always else [], host)
        spaces = sorted(before | after | held)
        return {space.value: max(1, max(before[space], after[space]) + held[space]) for space in spaces}

    def _demand(self, rooms: list[tuple[int, int]], host: frozenset[ComponentKind]) -> Counter[IndexSpace]:
        total: Counter[IndexSpace] = Counter()
        for begin, end in rooms:
            total.update(pages_needed(self.geometry, tokens=end, prompt_tokens=begin, host=host))
        return total

    def _largest(self) -> list[int]:
        """The longest prompts that can be in flight at once, and one more, whose pages may still be on their way back.

        And the last turn of every conversation: their pages are to stay. With `--host-tier` they are not, and fewer are in flight.
        """
        if self.options.host_tier:
            return sorted(self.lengths)[-SERVED_BY_SMALL_POOLS:]
        last = {request.conversation: request.tokens for request in self.requests if request.conversation}
        return [*last.values(), *sorted(self.lengths)[-IN_FLIGHT - 1 :]]


def _requests(options: DemoOptions, *, most_tokens: int) -> tuple[Request, ...]:
    """Return what is asked. Raises InvalidInputError for options that contradict one another or the model."""
    if options.host_tier and not options.turns:
        raise InvalidInputError("--host-tier is about prefixes that stay; say how many turns with --turns")
    if options.keep_answers and not options.turns:
        raise InvalidInputError("--keep-answers is about later turns; say how many with --turns")
    if not options.turns:
        return single_prompts(options.prompt_count, sparse=options.sparse, most_tokens=most_tokens)
    if options.encoding is not RowEncoding.NATIVE:
        raise InvalidInputError(
            f"--turns with {options.encoding} rows: prefill would go on from quantised rows, the model alone from its own "
            "numbers; leave --encoding out"
        )
    requests = conversations(
        options.prompt_count,
        options.turns,
        steps=options.step_count,
        system_tokens=SPARSE_SYSTEM_TOKENS if options.sparse else SYSTEM_TOKENS,
    )
    if (longest := max(request.tokens for request in requests)) > most_tokens:
        raise InvalidInputError(f"--turns {options.turns}: prompts of {longest} tokens, the model takes {most_tokens}")
    return requests


def _sparse_settings(facts: dict[str, Any], geometry: ModelGeometry, *, most_tokens: int) -> SparseSettings:
    """Return the smallest hot buffer that serves the model, so that rows give way to others in nearly every step.

    Raises InvalidInputError for a model that sparse decode does not suit.
    """
    dtype = facts.get("dtype") or facts.get("torch_dtype") or "float32"
    if dtype != "float32":
        raise InvalidInputError(
            f"--sparse: the model computes in {dtype}; the bound on rounding between sparse and dense sums takes float32"
        )
    if not any(component.kind is ComponentKind.C4_KV for component in geometry.components):
        raise InvalidInputError("--sparse: the model has no compressed_sparse_attention layer")
    component = geometry.component(ComponentKind.C4_KV)
    top_k = int(facts.get("index_topk", LIBRARY_TOP_K))
    hot_rows = -(-top_k // component.slots_per_page) * component.slots_per_page
    settings = SparseSettings(max_requests=IN_FLIGHT, hot_rows=hot_rows, top_k=top_k, max_tokens=most_tokens)
    settings.check_component(component)
    return settings


def _model(hf_config: Path | None) -> tuple[dict[str, Any], str]:
    if hf_config is None:
        with resources.as_file(resources.files("kvbridge").joinpath("engine/adapters/tiny_deepseek_v4.json")) as file:
            return read_hf_config(file), file.stem
    try:
        facts = read_hf_config(hf_config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.hf_config", "--hf-config")) from error
    if facts.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{hf_config}: the demo runs model_type '{MODEL_TYPE}', got {facts.get('model_type')!r}")
    return facts, hf_config.stem
