"""What a replay will run, decided before anything runs: options, requests, sizes of pools, the configuration of the daemons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from kvbridge.cli.local_cluster import Cluster, ClusterSpec, NodeSpec
from kvbridge.cli.trace import TraceRequest, prompt_tokens, read_trace
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.errors import CapacityError, InvalidInputError
from kvbridge.core.geometry.checkpoints import needs_checkpoints
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint, lane_interval
from kvbridge.core.geometry.pages import NO_HOST, pages_needed
from kvbridge.core.geometry.presets import PRESETS, preset
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.digests import DigestKind
from kvbridge.daemon.memory import plan_memory
from kvbridge.demo.options import Transport
from kvbridge.pool.memory.memory_limits import tightest_limit
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.tier.keys import NO_KEYS, Keys, PrefixIdentity, page_keys
from tests.bench.replay.engines import Job

SPARE = 2
"""Pools hold so many times the requests in flight: bootstrap's knowledge of free pages is a heartbeat old."""
BY_LENGTH = frozenset({IndexSpace.FULL, IndexSpace.HOST})
"""Spaces of which a long request needs more than a short one."""
SPARE_BYTES = 1 << 30
"""What the processes themselves need beside the pools."""
LONGEST_WAIT_S = 3600.0
PAGES_PER_CHECKPOINT = 32
"""Prefill's pools have one page for a checkpoint beside so many for tokens."""
LEAST_CHECKPOINTS = 16
"""Of the host tier."""
REVISION = "synthetic"
"""There are no weights."""


def _count_of(what: str, *, least: int = 1, most: int | None = None) -> Any:
    return typer.Option(min=least, max=most, metavar="N", help=what)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The options of `python -m tests.bench.replay`."""

    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids.")
    ]
    count: Annotated[int, _count_of("Requests to replay; 0: all of the trace.", least=0)] = 0
    start: Annotated[int, _count_of("Requests of the trace to skip first.", least=0)] = 0
    speed: Annotated[
        float,
        typer.Option(
            min=0, metavar="FACTOR", help="1: as the trace says; 10: ten times as fast; 0: as fast as admission lets."
        ),
    ] = 1.0
    model: Annotated[str, typer.Option(metavar="NAME", help=f"Whose geometry: {', '.join(PRESETS)}.")] = (
        "deepseek-v4-flash"
    )
    transport: Annotated[Transport, typer.Option(help="The only transport that both sides may use.")] = (
        Transport.MOONCAKE
    )
    prefill_pp: Annotated[int, _count_of("Prefill stages.", most=64)] = 1
    prefill_tp: Annotated[int, _count_of("Ranks a stage.", most=64)] = 1
    decode_pp: Annotated[int, _count_of("Decode stages.", most=64)] = 1
    decode_tp: Annotated[int, _count_of("Ranks a stage.", most=64)] = 1
    chunk_tokens: Annotated[int, _count_of("Prompt tokens written and published at a time.")] = 4096
    max_in_flight: Annotated[int, _count_of("Requests asked for or admitted at once.", most=4096)] = 4
    pool_tokens: Annotated[
        int, _count_of("Tokens that fit a node's pools; 0: twice what can be in flight.", least=0)
    ] = 0
    decode_ms_per_token: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Decode holds a room for output_length x this / speed.")
    ] = 0.0
    retry_for_s: Annotated[
        float, typer.Option("--retry-for", min=0, metavar="SECONDS", help="Ask again for so long after a refusal.")
    ] = 60.0
    prefixes: Annotated[
        bool, typer.Option("--prefixes/--no-prefixes", help="Prompts that share `hash_ids` share pages, on both nodes.")
    ] = True
    host_tokens: Annotated[
        int, _count_of("Tokens that a node's host memory keeps below its device pools; 0: none there.", least=0)
    ] = 0
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Decode keeps answers, too. No prompt of a trace has one.")
    ] = False
    digest: Annotated[
        DigestKind | None, typer.Option(help="integrity.digest of the decode daemon, if not its default.")
    ] = None
    report_file: Annotated[Path | None, typer.Option("--report", metavar="FILE.json", help="Write the report.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy configurations and logs there.")] = None
    patience_s: Annotated[
        float, typer.Option("--patience", min=1, metavar="SECONDS", help="Give up when no engine reports for so long.")
    ] = 120.0


@dataclass(frozen=True)
class ReplayPlan:
    """Everything that follows from the options."""

    options: ReplayOptions
    geometry: ModelGeometry
    requests: tuple[TraceRequest, ...]

    @classmethod
    def of(cls, options: ReplayOptions) -> Self:
        """Decide. Raises InvalidInputError for a trace or a model that cannot be replayed."""
        geometry = preset(options.model)
        for name, stages in (("--prefill-pp", options.prefill_pp), ("--decode-pp", options.decode_pp)):
            if stages > geometry.layer_count:
                raise InvalidInputError(f"{name} {stages}: {geometry.name} has only {geometry.layer_count} layers")
        plan = cls(options, geometry, read_trace(options.trace, start=options.start, count=options.count))
        plan.check_pool_tokens()
        return plan

    def due_s(self, index: int) -> float:
        """When a request is due, in seconds since the replay began; at speed 0 it is due once it may be asked for."""
        if not self.options.speed:
            return 0.0
        return (self.requests[index].timestamp - self.requests[0].timestamp) / 1000 / self.options.speed

    def job(self, cluster: Cluster) -> Job:
        """Return the job of the engine processes. Decode's own time passes at the speed of the trace."""
        options = self.options
        return Job(
            prefill_runtime_dir=cluster.prefill.runtime_dir,
            decode_runtime_dir=cluster.decode.runtime_dir,
            chunk_tokens=options.chunk_tokens,
            hold_s_per_token=options.decode_ms_per_token / 1000 / (options.speed or 1.0),
            prefixes=options.prefixes,
            answers=options.answers,
        )

    # ------------------------------------------------------------------ prefixes

    def keys(self, number: int) -> Keys:
        """Return the page keys of a request's prompt, as a router computes them; none when prefixes are not wanted."""
        if not self.options.prefixes:
            return NO_KEYS
        identity = PrefixIdentity(
            model=self.options.model,
            revision=REVISION,
            fingerprint=fingerprint(self.geometry),
            tokens_per_page=self.geometry.tokens_per_page,
        )
        return page_keys(identity, prompt_tokens(self.requests[number - 1], number))

    @cached_property
    def endless_tokens(self) -> tuple[int, ...]:
        """Of each prompt, how many tokens a cache would hold that forgets nothing, if requests came one after another."""
        known: set[bytes] = set()
        found = []
        for number in range(1, len(self.requests) + 1):
            keys = self.keys(number).to_list()
            hit = next((page for page, key in enumerate(keys) if key not in known), len(keys))
            found.append(hit * self.geometry.tokens_per_page)
            known.update(keys)
        return tuple(found)

    def whole_bytes(self, tokens: int) -> int:
        """Bytes of live rows that decode would be sent of so many tokens if it held nothing, to host pool and all ranks."""

        def copies(each: Component) -> int:
            ranks = range(1 if each.kind in self.host_kinds else self.options.decode_tp)
            widths = (lane_interval(each, rank, len(ranks)) for rank in ranks)
            return sum(stop - start for start, stop in widths) // each.lanes

        return sum(
            len(each.layers) * each.sent_bytes(each.live_rows(tokens)) * copies(each)
            for each in self.geometry.components
        )

    # ------------------------------------------------------------------ pools

    def check_pool_tokens(self) -> None:
        """Raise InvalidInputError when a request of the trace could never fit, or nothing would be kept."""
        if self.options.host_tokens and not self.options.prefixes:
            raise InvalidInputError("--host-tokens is host memory for prefixes, of which --no-prefixes keeps none")
        longest = max(request.input_length + request.output_length for request in self.requests)
        if self.options.pool_tokens and self.options.pool_tokens < longest:
            raise InvalidInputError(
                f"--pool-tokens {self.options.pool_tokens}: the longest request has {longest} tokens with its output"
            )

    def prefill_pages(self) -> dict[str, int]:
        """Pages of each space on prefill."""
        pages = self._pages([(request.input_length, request.input_length) for request in self.requests], NO_HOST)
        if self.options.prefixes and IndexSpace.SWA in pages:
            pages[IndexSpace.SWA] += pages[IndexSpace.FULL] // PAGES_PER_CHECKPOINT
            if self.host_pages:  # into which those of the host are loaded
                pages[IndexSpace.SWA] += SPARE * self.options.max_in_flight
        return pages

    def decode_pages(self) -> dict[str, int]:
        """Pages of each space on decode, the host pool's too."""
        rooms = [(request.input_length, request.input_length + request.output_length) for request in self.requests]
        return self._pages(rooms, self.host_kinds)

    @property
    def host_pages(self) -> int:
        """Pages of each node's host tier."""
        return -(-self.options.host_tokens // self.geometry.tokens_per_page)

    @property
    def host_kinds(self) -> frozenset[ComponentKind]:
        """The components that live in decode's host memory."""
        return frozenset({ComponentKind.C4_KV} & {component.kind for component in self.geometry.components})

    def _pages(self, rooms: list[tuple[int, int]], host: frozenset[ComponentKind]) -> dict[str, int]:
        """Return pages for rooms of (prompt, prompt and output) tokens: the longest of those that can be there at once.

        What every request needs about as much of, long or short, is counted generously, so that it is `full` pages that run out.
        """
        demands = [pages_needed(self.geometry, tokens=end, prompt_tokens=begin, host=host) for begin, end in set(rooms)]
        found: dict[str, int] = {}
        for space in demands[0]:
            each = sorted(demand[space] for demand in demands)
            if space not in BY_LENGTH:
                pages = SPARE * SPARE * self.options.max_in_flight * each[-1]
            elif self.options.pool_tokens:
                pages = -(-self.options.pool_tokens // self.geometry.tokens_per_page)
            else:
                pages = sum(each[-SPARE * self.options.max_in_flight :])
            found[space.value] = max(1, pages)
        return found

    # ------------------------------------------------------------------ daemons

    def cluster_spec(self, folder: Path) -> ClusterSpec:
        """Return the daemons to start."""
        options = self.options
        # Rooms wait for one prefill engine, and are held as long as the trace says: neither is a fault here.
        timeouts = dict.fromkeys(("offer_s", "room_s", "claim_s"), LONGEST_WAIT_S)
        timeouts |= {"shutdown_rooms_s": 3.0, "shutdown_close_s": 3.0}
        decode_pages = self.decode_pages()
        host_pages = decode_pages.pop(IndexSpace.HOST.value, 0)
        host_pool = {"components": sorted(self.host_kinds), "pages": host_pages + self.host_pages * bool(host_pages)}
        tier: dict[str, Any] = {}
        prefill_tier: dict[str, Any] = {}
        if options.prefixes:
            tier = {
                "enabled": True,
                "model_name": options.model,
                "model_revision": REVISION,
                "generated": options.answers,
            }
            prefill_tier = dict(tier)
            if self.host_pages:
                checkpoints = LEAST_CHECKPOINTS + self.host_pages // PAGES_PER_CHECKPOINT
                tier["host"] = {"pages": self.host_pages}
                prefill_tier["host"] = {
                    "pages": self.host_pages,
                    "checkpoint_pages": checkpoints * needs_checkpoints(self.geometry),
                }
        integrity = {"integrity": {"digest": options.digest}} if options.digest else {}
        return ClusterSpec(
            model={"preset": options.model},
            transport=options.transport.value,
            prefill=NodeSpec(
                instance=f"{folder.name}-prefill",
                pp=options.prefill_pp,
                tp=options.prefill_tp,
                pools={"device": self.prefill_pages()},
                more={"timeouts": timeouts, "tier": prefill_tier},
            ),
            decode=NodeSpec(
                instance=f"{folder.name}-decode",
                pp=options.decode_pp,
                tp=options.decode_tp,
                pools={"device": decode_pages, "host": host_pool},
                more={"timeouts": timeouts, "tier": tier, **integrity},
            ),
            bootstrap={"timeouts": {"ticket_s": LONGEST_WAIT_S, "room_keep_s": 2 * LONGEST_WAIT_S}},
            ends_with_us=True,
        )

    def check_memory(self, cluster: Cluster) -> int:
        """Return the bytes of all pools. Raises CapacityError when they do not fit into shared memory now."""
        configs = (
            PrefillConfig.model_validate(cluster.prefill.config),
            DecodeConfig.model_validate(cluster.decode.config),
        )
        total = sum(plan_memory(config, self.geometry).total_bytes for config in configs)
        limit = tightest_limit(DEFAULT_DIRECTORY)
        if total + SPARE_BYTES > limit.available_bytes:
            raise CapacityError(
                f"the pools need {total / 1e9:.1f} GB and the processes {SPARE_BYTES / 1e9:.1f} GB, the {limit.name} has "
                f"{limit.available_bytes / 1e9:.1f} GB left: lower --max-in-flight or --pool-tokens, or {limit.cure}"
            )
        return total
