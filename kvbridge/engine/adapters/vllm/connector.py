"""KvbridgeConnector: vLLM's hooks, and the reading of vLLM's objects. Beside `metrics` the only importer of vLLM.

vLLM makes one in its scheduler's process and one in each worker. All hooks run on the main thread of their process, so none of them
waits, but those at start and end. Those raise too, for whoever starts vLLM, or since something may still move bytes. No other one
does (`guard`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.adapters.vllm.guard import Guard, hook, nothing
from kvbridge.engine.adapters.vllm.instance import read_instance
from kvbridge.engine.adapters.vllm.metrics import KvbridgePromMetrics, KvbridgeStats
from kvbridge.engine.adapters.vllm.prefill_rooms import BlockPins, PrefillRooms
from kvbridge.engine.adapters.vllm.requests import Request, StepMetadata, prompt_digest
from kvbridge.engine.adapters.vllm.scheduler import RankReport, Scheduler
from kvbridge.engine.adapters.vllm.stats import TransferStats
from kvbridge.engine.adapters.vllm.worker import Worker
from kvbridge.telemetry.logs import leave_standard_output

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

HANDED_OVER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""How a request ends whose KV cache somebody else may use."""


@dataclass
class KvbridgeHandshake(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler's process, once."""

    report: RankReport


@dataclass
class KvbridgeMetadata(KVConnectorMetadata):
    """From the scheduler's process to the workers, at each step."""

    steps: dict[Role, StepMetadata] = field(default_factory=dict)


@dataclass
class KvbridgeWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler's process: by worker, the incarnations of nodes that it moves nothing for any more."""

    closed: dict[int, dict[Role, tuple[str, ...]]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Put what several workers say together; each says what it has to say once a step."""
        assert isinstance(other, KvbridgeWorkerMetadata)
        return KvbridgeWorkerMetadata({**self.closed, **other.closed})


class _Known(NamedTuple):
    """A request of vLLM, and as the halves know it."""

    request: Any
    told: Request


class KvbridgeConnector(KVConnectorBase_V1):
    """See the module. vLLM finds it by its name, or by `kv_connector_module_path`."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        leave_standard_output()
        self._instance = read_instance(vllm_config, kv_cache_config, version=vllm.__version__)
        self._layers = frozenset(kv_cache_config.transfer_group_index_by_layer)
        """Layers with a KV cache of their own; vLLM adds those that share one later."""
        self._requests: dict[str, _Known] = {}
        """In the scheduler's process: those that two engines have, until they have finished."""
        self._handshake: KvbridgeHandshake | None = None
        self._stats = TransferStats()
        self.guard = Guard(self._stats.failed)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(self._instance, self._stats, self.guard)
        else:
            self._worker = Worker(self._instance, _this_rank(), self.guard)

    # ------------------------------------------------------------------ what vLLM asks before it starts

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outermost, so that ranks may be split otherwise on the other side."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    def get_finished_count(self) -> int | None:
        """Worker 0 reports for all."""
        return 1

    # ------------------------------------------------------------------ scheduler: start and end

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        reports = {
            Rank(pp=pp, tp=tp): told.report
            for (pp, tp), told in metadata.items()
            if isinstance(told, KvbridgeHandshake)
        }
        self._of_scheduler().start(reports)

    def shutdown(self) -> None:
        """Nothing of this process moves a byte afterwards, and no child of it is left."""
        with ExitStack() as stack:  # whatever one of them fails with, the other is closed
            if self._worker is not None:
                stack.callback(self._worker.close)
            if self._scheduler is not None:
                stack.callback(self._scheduler.close)

    def _of_scheduler(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def _of_worker(self) -> Worker:
        assert self._worker is not None
        return self._worker

    # ------------------------------------------------------------------ scheduler: blocks

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._of_scheduler().pins = BlockPins(gpu_block_pool)

    @hook(bool)
    def has_pending_block_frees(self) -> bool:
        if (rooms := self._of_scheduler().prefill) is None:
            return False
        preempted = RequestStatus.PREEMPTED
        return rooms.blocks_return([one for one in rooms.computing if self._requests[one].request.status is preempted])

    @hook(bool)
    def has_pending_push_work(self) -> bool:
        rooms = self._of_scheduler().prefill
        return rooms is not None and rooms.has_pins

    # ------------------------------------------------------------------ scheduler: requests

    @hook(nothing, of_request=True)
    def on_new_request(self, request: Any) -> None:
        if not request.kv_transfer_params:
            return
        refused = Request(request.request_id, request.num_prompt_tokens, b"", request.kv_transfer_params)
        told = None
        if not request.abort_immediately:
            with self.guard.over("computed_here", request.request_id):
                told = _told(request)
        if told is None:
            self._of_scheduler().declined(refused)  # the API has refused it: it comes aborted, with another prompt
            return
        self._requests[request.request_id] = _Known(request, told)
        self._of_scheduler().arrived(told)

    @hook(lambda: (0, False), of_request=True)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        known, rooms = self._requests.get(request.request_id), self._of_scheduler().decode
        tokens = 0 if known is None or rooms is None else rooms.matched_tokens(known.told, num_computed_tokens)
        return tokens, tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    @hook(nothing, of_request=True)
    def update_state_after_alloc(self, request: Any, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        known, rooms = self._requests.get(request.request_id), self._of_scheduler().decode
        if known is not None and rooms is not None:
            rooms.allocated(known.told, blocks.get_block_ids()[0], num_external_tokens)

    @hook(lambda: (False, None), of_request=True)
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return False, None
        return self._of_scheduler().finished(known.told, block_ids, well=request.status in HANDED_OVER)

    @hook(KvbridgeMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        scheduler = self._of_scheduler()
        scheduler.look()
        if scheduler.prefill is not None:
            self._tell_computed(scheduler.prefill, scheduler_output)
        return KvbridgeMetadata(scheduler.step())

    def _tell_computed(self, rooms: PrefillRooms, scheduler_output: SchedulerOutput) -> None:
        """Tell what was computed and preempted since the last step."""
        if scheduler_output.preempted_req_ids:
            rooms.preempted(scheduler_output.preempted_req_ids)
        state = scheduler_output.kv_connector_block_state
        for request in rooms.computing if state is not None else ():
            with self.guard.over("computed", request, lost=partial(self.guard.lose, request)):
                groups = state.get_block_ids(request)
                if groups is not None:
                    known = self._requests[request].request
                    rooms.computed(request, known.num_computed_tokens, known.num_in_flight_tokens, groups[0])

    @hook(nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        scheduler = self._of_scheduler()
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvbridgeWorkerMetadata):
            for rank, roles in told.closed.items():
                for role, nodes in roles.items():
                    scheduler.closed(rank, role, nodes)
        scheduler.reported(connector_output.finished_recving or (), connector_output.finished_sending or ())

    # ------------------------------------------------------------------ statistics

    @hook(nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._stats.take(holds=self._scheduler is not None)
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

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        ours = {name: tensor for name, tensor in kv_caches.items() if name in self._layers}
        self._handshake = KvbridgeHandshake(self._of_worker().register(ours, _facts(self._vllm_config, ours)))

    def unregister_kv_caches(self) -> None:
        """Let go of the tensors before vLLM sleeps (0.33). What it raises keeps vLLM from that: see `Worker.unregister`."""
        self._of_worker().unregister()

    def restore_kv_caches(self) -> None:
        self._of_worker().restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake

    @hook(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvbridgeMetadata)
        self._of_worker().start(metadata.steps)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are read where they are."""

    def wait_for_save(self) -> None:
        """Blocks are read where they are."""

    @hook(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        over = self._of_worker().results()
        return KVConnectorTransferResults(finished_sending=set(over.sent), finished_recving=set(over.received))

    @hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker().unfilled_blocks()

    @hook(nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        worker = self._of_worker()
        closed = worker.closed_here()
        return KvbridgeWorkerMetadata({worker.number: closed}) if closed else None


def _told(request: Any) -> Request:
    """Return a request of vLLM as the halves are to know it. Raises InvalidInputError when it is not made of tokens alone."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise InvalidInputError("its prompt has embeddings, which are not compared")
    adapter = request.lora_request
    digest = prompt_digest(
        request.prompt_token_ids,
        adapter="" if adapter is None else f"{adapter.lora_name}@{adapter.lora_path}",
        inputs=tuple(feature.identifier for feature in request.mm_features),
        salt=request.cache_salt or "",
    )
    return Request(request.request_id, request.num_prompt_tokens, digest, request.kv_transfer_params)


def _this_rank() -> Rank:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group  # noqa: PLC0415 - groups are of workers only

    return Rank(pp=get_pp_group().rank_in_group, tp=get_tp_group().rank_in_group)


def _facts(vllm_config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What decides about the bytes inside a block, as the worker knows it."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends  # noqa: PLC0415 - heavy

    backends = get_current_attn_backends(vllm_config, list(tensors))
    facts = {"attention_backend": ",".join(sorted(backend.get_name() for backend in backends))}
    if next(iter(tensors.values())).device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - for processors only

        model, cache = vllm_config.model_config, vllm_config.cache_config
        block_tokens = next(iter(tensors.values())).shape[2]
        facts["cpu_isa"] = _get_attn_isa(model.dtype, block_tokens, model.get_head_size(), cache.cache_dtype)
    return facts
