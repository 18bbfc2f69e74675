"""vLLM's calls of the connector class as a model, and a real node's engine API behind kvbridge's own code."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from kvbridge.config.limits import AdmissionConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import Role
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.engine_messages import Attach, Attached, EngineToNode, NodeToEngine
from kvbridge.core.wire.messages import FEATURES
from kvbridge.engine import DecodeEngine, PrefillEngine
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.transfers import ServedRole
from kvbridge.engine.link import EngineLink
from kvbridge.engine.memory import EngineMemory
from kvbridge.engine.streams import StreamOrder
from kvbridge.engine.vllm.decode_rooms import DecodeRooms
from kvbridge.engine.vllm.prefill_rooms import PrefillRooms
from kvbridge.node.admission import AdmissionController
from kvbridge.node.engines import Engines
from tests.helpers.node_bench import DecodeBench, PrefillBench
from tests.helpers.rooms import GEOMETRY, PAGE, R0
from tests.helpers.vllm_links import attach

OURS = ("connector",)
PACKAGE = "kvbridge.engine.vllm"
STEPS = 6
"""A refusal, or an end, is reported within so many."""


class KVConnectorRole(Enum):
    SCHEDULER = auto()
    WORKER = auto()


class Status(Enum):
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    PREEMPTED = auto()


class _Base:
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._connector_metadata: Any = None

    def _get_connector_metadata(self) -> Any:
        return self._connector_metadata


@dataclass
class _Results:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None


class _Stats:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


def _modules() -> dict[str, ModuleType]:
    empty = type("Empty", (), {})
    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0"},
        f"{base}.base": {
            "KVConnectorBase_V1": _Base,
            "KVConnectorHandshakeMetadata": empty,
            "KVConnectorMetadata": empty,
            "KVConnectorRole": KVConnectorRole,
            "KVConnectorTransferResults": _Results,
            "KVConnectorWorkerMetadata": empty,
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        f"{base}.metrics": {"KVConnectorPromMetrics": empty, "KVConnectorStats": _Stats},
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": SimpleNamespace(P2P=1)},
        "vllm.v1.metrics.utils": {"create_metric_per_engine": None},
        "vllm.v1.request": {"RequestStatus": Status},
        "vllm.distributed.parallel_state": dict.fromkeys(
            ("get_pp_group", "get_tp_group"), lambda: SimpleNamespace(rank_in_group=0)
        ),
    }
    made = {}
    for full, names in contents.items():
        parts = full.split(".")
        for upto in range(1, len(parts) + 1):
            name = ".".join(parts[:upto])
            made.setdefault(name, ModuleType(name))
        vars(made[full]).update(names)
    return made


@contextmanager
def connector_module() -> Iterator[ModuleType]:
    """Yield the module of the connector class, over vLLM's names alone. Afterwards neither is loaded."""
    ours = [f"{PACKAGE}.{name}" for name in OURS]
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name in ours or name.split(".")[0] == "vllm"}
    package = importlib.import_module(PACKAGE)
    try:
        sys.modules |= _modules()
        yield importlib.import_module(ours[0])
    finally:
        for name in [name for name in sys.modules if name in ours or name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        for name in OURS:
            vars(package).pop(name, None)
        sys.modules |= before


class Wire:
    """An engine's connection to its node, without a socket. In the place of the engine's `LocalClient`."""

    def __init__(self, name: str, node: Node) -> None:
        self.name = name
        self.node = node
        self.inbox: deque[bytes] = deque()

    def send(self, message: EngineToNode, timeout_s: float) -> None:
        body = ENGINE_TO_NODE.encode_body(message)
        self.node.api.handle(self.name, ENGINE_TO_NODE.decode_body(body))

    def receive(self, timeout_s: float) -> NodeToEngine | None:
        return NODE_TO_ENGINE.decode_body(self.inbox.popleft()) if self.inbox else None

    def close(self) -> None:
        """Nothing is open."""


class Node:
    """The node beside vLLM: its engine API and its rooms, over adopted pools; or another one, over pools of its own."""

    def __init__(self, role: Role, *, adopted: bool = True) -> None:
        self.bench = PrefillBench(adopted=adopted) if role is Role.PREFILL else DecodeBench(adopted=adopted)
        self.role = role
        self.wires: dict[str, Wire] = {}
        self.runtime_dir = Path("/nowhere")
        bench = self.bench
        bench.engines.push = self._push
        admission = AdmissionController(bench.service, bench.book, limits=AdmissionConfig(), events=bench.events)
        self.api = Engines((R0,), bench.events, settle_s=0)
        self.api.send = self._send
        self.api.serve(bench.service, admission, attached=self._describe)

    def _describe(self, call: int, ranks: Any) -> Attached:
        facts = {"instance": "i", "incarnation": "n", "geometry": GEOMETRY, "pp_size": 1, "tp_size": 1}
        return Attached(call=call, **facts, ranks=ranks, layers={}, features=FEATURES)

    def _send(self, engine: str, message: NodeToEngine) -> None:
        self.wires[engine].inbox.append(NODE_TO_ENGINE.encode_body(message))

    def _push(self, event: NodeToEngine) -> None:
        for engine in self.wires:
            self._send(engine, event)

    def attach(self) -> PrefillEngine | DecodeEngine:
        wire = Wire(f"engine-{len(self.wires)}", self)
        self.wires[wire.name] = wire
        link = EngineLink.__new__(EngineLink)
        link._client, link.timeout_s, link.daemon_user, link.lost = wire, 1.0, None, ""
        link._numbers, link._events, link._posted, link._overflowed = itertools.count(1), deque(), {}, False
        answer = link.call(Attach(call=link.number(), role=self.role, ranks=(), features=FEATURES), Attached)
        kind = PrefillEngine if self.role is Role.PREFILL else DecodeEngine
        return kind(link, answer, EngineMemory(answer, {}, None, None), StreamOrder({}), workers=())

    def endpoint(self) -> Any:
        prefill = self.role is Role.PREFILL
        return SimpleNamespace(control=PeerAddress(endpoint="tcp://127.0.0.1:7801") if prefill else None)

    def close(self) -> None:
        """Nothing runs."""


class Vllm:
    """A vLLM of one worker, with one of our connectors in each of its two places. An error of a hook leaves a method of this."""

    def __init__(self, module: ModuleType, role: Role, *specs: Any) -> None:
        self.node = Node(role)
        cache = cache_config(FullAttentionSpec(PAGE), *specs)
        config = vllm_config("kv_producer" if role is Role.PREFILL else "kv_consumer")
        self.scheduler = module.KvbridgeConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.worker = module.KvbridgeConnector(config, KVConnectorRole.WORKER, cache)
        ours, theirs = self.scheduler._scheduler, self.worker._worker
        kind = PrefillRooms if role is Role.PREFILL else DecodeRooms
        self.rooms = kind(ours._instance, self.node, self._attached(), self.scheduler._stats, self.scheduler.guard)
        setattr(ours, role.value, self.rooms)
        serve = lambda: SimpleNamespace(node="n", ends=list)  # noqa: E731
        theirs.roles.append(ServedRole(role, serve, self._attached()))
        self.rooms.look()
        self.waiting: dict[str, Any] = {}
        """Requests that wait for a load, or whose blocks are held, until that is reported."""
        self.failed: set[str] = set()
        self.failures: dict[str, int] = {}

    def _attached(self) -> NodeAttachment:
        attachment = NodeAttachment(self.node.role, self.node.runtime_dir)
        attach(attachment, self.node.attach()._link, "n")
        return attachment

    def arrives(self, request: Any, blocks: list[int]) -> None:
        self.scheduler.on_new_request(request)
        if request.abort_immediately:
            self.scheduler.request_finished_all_groups(request, ([],))
            return
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert is_async == (tokens > 0)
        held = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, held, tokens)
        if tokens:
            self.waiting[request.request_id] = request

    def ends(self, request: Any, blocks: list[int], status: Status = Status.FINISHED_LENGTH_CAPPED) -> Any:
        request.status = status
        held, answer = self.scheduler.request_finished_all_groups(request, (blocks,))
        if held:
            self.waiting[request.request_id] = request
        return answer

    def steps(self, count: int = STEPS) -> None:
        """Take some steps, each with vLLM's calls in vLLM's order."""
        for _ in range(count):
            output = SimpleNamespace(preempted_req_ids=set(), kv_connector_block_state=None)
            self.worker._connector_metadata = self.scheduler.build_connector_meta(output)
            self.worker.start_load_kv(None)
            over = self.worker.get_transfer_results(set())
            self.failed |= over.failed_recving or set()
            received, sent = over.finished_recving or set(), over.finished_sending or set()
            for reported in (*received, *sent):
                del self.waiting[reported]  # vLLM ends of a report too many
            told = SimpleNamespace(
                finished_recving=received,
                finished_sending=sent,
                kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
            )
            self.scheduler.update_connector_output(told)
            self.scheduler.has_pending_block_frees()
            self.scheduler.has_pending_push_work()
            for connector in (self.scheduler, self.worker):
                stats = connector.get_kv_connector_stats()
                for code, number in ({} if stats is None else stats.data["failures"]).items():
                    self.failures[code] = self.failures.get(code, 0) + number


def request(name: str, params: Any, *, tokens: int = 2 * PAGE, refused: bool = False) -> Any:
    """A request as vLLM has it. `refused`: by its API, so that it comes aborted."""
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        abort_immediately=refused,
        num_prompt_tokens=tokens,
        prompt_token_ids=list(range(tokens)),
        _all_token_ids=list(range(tokens)),
        max_tokens=16,
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        status=None,
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        skip_reading_prefix_cache=False,
    )


@dataclass
class FullAttentionSpec:
    """vLLM's class of this name, of which our connector reads the names of classes and these fields."""

    block_size: int


@dataclass
class SlidingWindowSpec:
    block_size: int
    sliding_window: int
    extra_retained_tokens: int = 0


def cache_config(*specs: Any, **more: Any) -> Any:
    each = {"host_resident": False, "enable_kv_transfer": True}
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"model.layers.{number}.attn"], **each)
        for number, spec in enumerate(specs)
    ]
    facts = {"num_blocks": 8, "kv_cache_layout": "LBHNC", "transfer_group_index_by_layer": {}}
    ids = tuple(range(len(specs)))
    return SimpleNamespace(kv_cache_groups=groups, transfer_group_ids=ids, **facts | more)


def vllm_config(kv_role: str, extra: dict[str, Any] | None = None, *, speculative: Any = None, **parallel: int) -> Any:
    sizes = ("tensor_parallel", "pipeline_parallel", "decode_context_parallel", "prefill_context_parallel")
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}, engine_id="e", kv_role=kv_role),
        parallel_config=SimpleNamespace(**{f"{size}_size": 1 for size in sizes} | parallel),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 1,
            use_mla=False,
            model="m",
            revision=None,
            quantization=None,
            dtype="torch.float32",
        ),
        speculative_config=speculative,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
