"""KvbridgeConnector: vLLM's hooks, and the reading of vLLM's objects. The only importer of vLLM.

vLLM makes one in its scheduler's process and one in each worker. All hooks run on the main thread of their process, so only hooks
at start and end wait. Only these raise, too: for the person who starts vLLM, or because something may still move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.transfers import StepMetadata, prompt_digest
from kvbridge.engine.vllm.prefill_rooms import BlockPins, PrefillRooms
from kvbridge.engine.vllm.processes import RankReport, Scheduler, Worker
from kvbridge.engine.vllm.requests import Request, read_instance
from kvbridge.engine.vllm.stats import (
    BUCKETS_BYTES,
    BUCKETS_S,
    TransferStats,
    add_counts,
    is_nothing,
    no_counts,
    summary,
)
from kvbridge.telemetry.logs import leave_standard_output

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

HANDED_OVER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""Ends of requests whose KV cache another engine may use."""
BUCKETS = {"load_seconds": BUCKETS_S, "load_bytes": BUCKETS_BYTES}
DOCUMENTATION = {
    "load_seconds": "From naming the blocks of a request until its KV cache is in them.",
    "load_bytes": "KV cache loaded for a request.",
    "load_operations": "Copies between machines that loads were made of.",
    "sent": "Requests whose KV cache decode has taken from here.",
    "held_requests": "Finished requests whose blocks wait for decode.",
    "held_blocks": "Their blocks.",
}
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def nothing() -> None:
    """Answer of a hook that returns None."""


def hook(otherwise: Callable[[], Any], *, of_request: bool = False) -> Callable[[MethodT], MethodT]:
    """Return a decorator for a hook of a class with a `guard`. A hook that fails returns `otherwise()`.

    `of_request`: the hook's first argument is a request with a `request_id`. The request is lost when the hook fails.
    """

    def guarded(method: MethodT) -> MethodT:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            what, name, lost = method.__name__, "", None
            if of_request:
                what, name = "computed_here", (args[0] if args else kwargs["request"]).request_id
                lost = partial(self.guard.lose, name)
            with self.guard.over(what, name, lost=lost):
                return method(self, *args, **kwargs)
            return otherwise()

        return cast("MethodT", call)

    return guarded


@dataclass
class KvbridgeHandshake(KVConnectorHandshakeMetadata):
    """A worker's news for the scheduler's process, once."""

    report: RankReport


@dataclass
class KvbridgeMetadata(KVConnectorMetadata):
    """News of the scheduler's process for the workers, at each step."""

    steps: dict[Role, StepMetadata] = field(default_factory=dict)


@dataclass
class KvbridgeWorkerMetadata(KVConnectorWorkerMetadata):
    """Incarnations of nodes for which a worker moves nothing any more, by worker: news for the scheduler's process."""

    closed: dict[int, dict[Role, tuple[str, ...]]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the news of several workers; each sends some at most once a step."""
        assert isinstance(other, KvbridgeWorkerMetadata)
        return KvbridgeWorkerMetadata({**self.closed, **other.closed})


class KvbridgeStats(KVConnectorStats):
    """Counts of some steps."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or no_counts())

    def reset(self) -> None:
        self.data = no_counts()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = add_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return is_nothing(self.data)


class KvbridgePromMetrics(KVConnectorPromMetrics):
    """Counts as metrics, in the process that serves HTTP."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shown = {name: self._made(name, text) for name, text in DOCUMENTATION.items()}
        self._failures = self._counter_cls(
            name="vllm:kvbridge_failures",
            documentation="Loads and held requests that ended otherwise, and errors of hooks, by code.",
            labelnames=[*self._labelnames, "code"],
        )

    def _made(self, name: str, documentation: str) -> dict[int, Any]:
        kind, more = self._counter_cls, dict[str, Any]()
        if name in BUCKETS:
            kind, more = self._histogram_cls, {"buckets": BUCKETS[name]}
        elif name.startswith("held"):
            kind, more = self._gauge_cls, {"multiprocess_mode": "mostrecent"}
        metric = kind(name=f"vllm:kvbridge_{name}", documentation=documentation, labelnames=self._labelnames, **more)
        found: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return found

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counts = transfer_stats_data
        shown = {name: metrics[engine_idx] for name, metrics in self._shown.items()}
        for name, key in (("load_seconds", "seconds"), ("load_bytes", "bytes")):
            for value in counts[key]:
                shown[name].observe(value)
        shown["load_operations"].inc(sum(counts["operations"]))
        shown["sent"].inc(counts["sent"])
        if counts["held_rooms"] is not None:
            shown["held_requests"].set(counts["held_rooms"])
            shown["held_blocks"].set(counts["held_blocks"])
        for code, count in counts["failures"].items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], code).inc(count)


class KvbridgeConnector(KVConnectorBase_V1, SupportsHMA):
    """The class that vLLM finds by its name, or by `kv_connector_module_path`."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        leave_standard_output()
        self._instance = read_instance(vllm_config, kv_cache_config, version=vllm.__version__)
        self._layers = frozenset(kv_cache_config.transfer_group_index_by_layer)
        """Layers with a KV cache of their own. vLLM adds layers that share one later."""
        self._requests: dict[str, tuple[Any, Request]] = {}
        """Requests with `kv_transfer_params` until they have finished, vLLM's object and our copy. In the scheduler's process
        only."""
        self._handshake: KvbridgeHandshake | None = None
        self._stats = TransferStats()
        self.guard = Guard(self._stats.failed)
        self._half: Scheduler | Worker
        if role is KVConnectorRole.SCHEDULER:
            self._half = self._scheduler = Scheduler(self._instance, self._stats, self.guard)
        else:
            self._half = self._worker = Worker(self._instance, _this_rank(), self.guard)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ask for heads outermost, so that the other side may split ranks otherwise."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        reports = {
            Rank(pp=pp, tp=tp): told.report
            for (pp, tp), told in metadata.items()
            if isinstance(told, KvbridgeHandshake)
        }
        self._scheduler.start(reports)

    def shutdown(self) -> None:
        """End all transfers of this process, and its children."""
        self._half.close()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.pins = BlockPins(gpu_block_pool)

    @hook(bool)
    def has_pending_block_frees(self) -> bool:
        if (rooms := self._scheduler.prefill) is None:
            return False
        preempted = RequestStatus.PREEMPTED
        return rooms.blocks_return([one for one in rooms.computing if self._requests[one][0].status is preempted])

    @hook(bool)
    def has_pending_push_work(self) -> bool:
        rooms = self._scheduler.prefill
        return rooms is not None and rooms.has_pins

    @hook(nothing, of_request=True)
    def on_new_request(self, request: Any) -> None:
        if not request.kv_transfer_params:
            return
        refused = Request(request.request_id, 0, b"", request.kv_transfer_params)
        told = None
        if not request.abort_immediately:
            with self.guard.over("computed_here", request.request_id):
                told = self._told(request)
        if told is None:
            self._scheduler.declined(refused)  # a request that the API has refused comes aborted, with another prompt
            return
        self._requests[request.request_id] = request, told
        self._scheduler.arrived(told)

    def _told(self, request: Any) -> Request | None:
        """Copy a request of vLLM; None when there is nothing to move for it. For another engine, leave its last tokens out.

        Raises InvalidInputError when its prompt has more than tokens.
        """
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise InvalidInputError("its prompt has embeddings, which are not compared")
        groups, adapter = self._instance.groups, request.lora_request
        tokens = groups.tokens(request.num_prompt_tokens)
        # A prompt with logprobs of its own is computed whole on both sides.
        if not tokens or (groups.step_back and request.skip_reading_prefix_cache):
            return None
        digest = prompt_digest(
            request.prompt_token_ids,
            adapter="" if adapter is None else f"{adapter.lora_name}@{adapter.lora_path}",
            inputs=tuple(feature.identifier for feature in request.mm_features),
            salt=request.cache_salt or "",
        )
        told = Request(request.request_id, tokens, digest, request.kv_transfer_params)
        if told.is_for_another and Role.PREFILL in self._instance.roles and tokens < request.num_prompt_tokens:
            del request._all_token_ids[tokens:]  # noqa: SLF001 - as vLLM's own connectors do
            request.prompt_token_ids = request.prompt_token_ids[:tokens]  # of others, too
            # A second token would move the window or the state.
            request.num_prompt_tokens, request.max_tokens = tokens, 1
        return told

    @hook(lambda: (0, False), of_request=True)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        known, rooms = self._requests.get(request.request_id), self._scheduler.decode
        tokens = 0 if known is None or rooms is None else rooms.matched_tokens(known[1], num_computed_tokens)
        return tokens, tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    @hook(nothing, of_request=True)
    def update_state_after_alloc(self, request: Any, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        known, rooms = self._requests.get(request.request_id), self._scheduler.decode
        if known is not None and rooms is not None:
            rooms.allocated(known[1], blocks.get_block_ids(), num_external_tokens)

    @hook(lambda: (False, None), of_request=True)
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return False, None
        return self._scheduler.finished(known[1], block_ids, well=request.status in HANDED_OVER)

    @hook(KvbridgeMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduler = self._scheduler
        scheduler.look()
        if scheduler.prefill is not None:
            self._tell_computed(scheduler.prefill, scheduler_output)
        return KvbridgeMetadata(scheduler.step())

    def _tell_computed(self, rooms: PrefillRooms, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.preempted_req_ids:
            rooms.preempted(scheduler_output.preempted_req_ids)
        state = scheduler_output.kv_connector_block_state
        for request in rooms.computing if state is not None else ():
            with self.guard.over("computed", request, lost=partial(self.guard.lose, request)):
                groups = state.get_block_ids(request)
                if groups is not None:
                    known = self._requests[request][0]
                    rooms.computed(request, known.num_computed_tokens, known.num_in_flight_tokens, groups)

    @hook(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        scheduler = self._scheduler
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvbridgeWorkerMetadata):
            for rank, roles in told.closed.items():
                for role, nodes in roles.items():
                    scheduler.closed(rank, role, nodes)
        scheduler.reported(connector_output.finished_recving or (), connector_output.finished_sending or ())

    @hook(nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._stats.take(holds=isinstance(self._half, Scheduler))
        return None if counts is None else KvbridgeStats(counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvbridgeStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KvbridgePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        ours = {name: tensor for name, tensor in kv_caches.items() if name in self._layers}
        facts = _facts(self._vllm_config, ours, self._instance.groups.block_tokens)
        self._handshake = KvbridgeHandshake(self._worker.register(ours, facts))

    def unregister_kv_caches(self) -> None:
        """Let go of the tensors before vLLM sleeps (0.33). An error keeps vLLM from sleeping: see `Worker.unregister`."""
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake

    @hook(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvbridgeMetadata)
        self._worker.start(metadata.steps)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to do: loads are over before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are read where they are."""

    def wait_for_save(self) -> None:
        """Nothing to do: blocks are read where they are."""

    @hook(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # Failures are told by request: with several groups, vLLM ends of blocks that are reported.
        return KVConnectorTransferResults(*self._worker.results())

    @hook(nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        worker = self._worker
        closed = worker.closed_here()
        return KvbridgeWorkerMetadata({worker.number: closed}) if closed else None


def _this_rank() -> Rank:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415 - groups are of workers only

    return Rank(pp=get_pp_group().rank_in_group, tp=get_tp_group().rank_in_group)


def _facts(vllm_config: Any, tensors: Mapping[str, torch.Tensor], block_tokens: int) -> dict[str, str]:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415 - heavy

    backends = get_current_attn_backends(vllm_config, list(tensors))
    facts = {"attention_backend": ",".join(sorted(backend.get_name() for backend in backends))}
    if next(iter(tensors.values())).device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - for processors only

        model, cache = vllm_config.model_config, vllm_config.cache_config
        facts["cpu_isa"] = _get_attn_isa(model.dtype, block_tokens, model.get_head_size(), cache.cache_dtype)
    return facts
