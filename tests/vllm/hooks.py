"""vLLM's own opinion of the connector class, without a server; `test_guide.py` runs this with vLLM's Python."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine import vllm as plugin
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.transfers import ServedRole, StepMetadata, Transfer
from kvbridge.engine.vllm import connector
from kvbridge.engine.vllm.connector import KvbridgeConnector, KvbridgeStats, KvbridgeWorkerMetadata
from kvbridge.engine.vllm.groups import CacheGroup, CacheGroups, GroupKind
from kvbridge.engine.vllm.prefill_rooms import BlockPins
from kvbridge.engine.vllm.processes import Worker
from kvbridge.engine.vllm.stats import add_counts, no_counts


def vllm_finds_it_by_its_name_and_by_its_path() -> None:
    load_general_plugins()
    plugin.register()
    module = SimpleNamespace(kv_connector=plugin.NAME, kv_connector_module_path=connector.__name__)
    assert KVConnectorFactory.get_connector_class_by_name(plugin.NAME) is KvbridgeConnector
    assert KVConnectorFactory.get_connector_class(module) is KvbridgeConnector
    assert supports_hma(KvbridgeConnector), "models with several groups would lose their hybrid cache manager"
    assert not KvbridgeConnector.__abstractmethods__


def pinned_blocks_are_not_given_away() -> None:
    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=128)
    held, at_first = BlockPins(pool), pool.get_num_free_blocks()
    blocks = pool.get_new_blocks(3)
    held.pin([block.block_id for block in blocks])
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == at_first - 3
    held.unpin([block.block_id for block in blocks])
    assert pool.get_num_free_blocks() == at_first


def told(tokens: list[int], **fields: Any) -> Any:
    """A request of vLLM, made from a client's parameters, as the connector copies it."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    groups = CacheGroups((CacheGroup(GroupKind.FULL, 16),), {})
    place = SimpleNamespace(_instance=SimpleNamespace(groups=groups, roles=(Role.PREFILL,)))
    return KvbridgeConnector._told(place, Request("r", tokens, params, None, **fields))


def requests_are_compared_by_all_that_decides_about_their_cache() -> None:
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    others = (told([1, 2, 3], cache_salt="s"), told([1, 2, 3], lora_request=lora), told([1, 2, 4]))
    assert len({told([1, 2, 3]).prompt_digest, *(one.prompt_digest for one in others)}) == 4
    assert told([1, 2, 3]).prompt_digest == told([1, 2, 3]).prompt_digest
    assert told([1]).params == {"do_remote_decode": True}


def counts_go_through_vllms_classes() -> None:
    counts = no_counts() | {"seconds": [0.5], "bytes": [1 << 20], "operations": [4], "held_rooms": 2, "held_blocks": 7}
    counts["failures"] = {"unknown_room": 3}
    stats = KvbridgeConnector.build_kv_connector_stats(json.loads(json.dumps(counts)))
    both = stats.aggregate(KvbridgeStats(json.loads(json.dumps(counts))))
    assert KvbridgeStats().is_empty()
    assert not both.is_empty()
    assert both.data == add_counts(counts, counts)
    assert (both.reduce()["Loads"], both.reduce()["Failed (unknown_room)"]) == (2, 6)
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    shown = KvbridgeConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    shown.observe(both.to_dict(), 0)
    lines = [line for line in generate_latest(REGISTRY).decode().splitlines() if line.startswith("vllm:kvbridge_")]
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    labels = '{engine="0",model_name="m"}'
    assert {name: value for name, value in values.items() if "_created" not in name and "_bucket" not in name} == {
        f"vllm:kvbridge_load_seconds_count{labels}": 2,
        f"vllm:kvbridge_load_seconds_sum{labels}": 1,
        f"vllm:kvbridge_load_bytes_count{labels}": 2,
        f"vllm:kvbridge_load_bytes_sum{labels}": 2 << 20,
        f"vllm:kvbridge_load_operations_total{labels}": 8,
        f"vllm:kvbridge_sent_total{labels}": 0,
        f"vllm:kvbridge_held_requests{labels}": 2,
        f"vllm:kvbridge_held_blocks{labels}": 7,
        'vllm:kvbridge_failures_total{code="unknown_room",engine="0",model_name="m"}': 6,
    }


def reports_of_all_workers_complete_a_transfer_alone_and_beside_other_connectors() -> None:
    both = KvbridgeWorkerMetadata({0: {"prefill": ("a",)}}).aggregate(KvbridgeWorkerMetadata({1: {"prefill": ("a",)}}))
    assert sorted(both.closed) == [0, 1]
    begun = Transfer("r", 7, "node", is_load=True), Transfer("s", 8, "node")
    ended = tuple(RoomEvent(room=one.room, kind="completed", generation=1) for one in begun)
    transfers = StepMetadata(begun=begun, ended=ended)
    ours, theirs = (object.__new__(kind) for kind in (KvbridgeConnector, OffloadingConnector))
    pair = object.__new__(MultiConnector)
    pair._connectors, pair._extra_async_saves = [ours, theirs], {}
    theirs.get_transfer_results = lambda _: KVConnectorTransferResults()
    ours.guard = Guard(lambda *_: None)
    for asked in (ours, pair):
        counting, outputs = KVOutputAggregator.from_connector(asked, world_size=2), []
        for tp in range(2):
            ours._worker = Worker(SimpleNamespace(tp_size=2), Rank(pp=0, tp=tp), ours.guard)
            ours._worker.roles.append(ServedRole(Role.DECODE, lambda: None))
            ours._worker.start({Role.DECODE: transfers})
            told = asked.get_transfer_results(set())
            sides = {"finished_sending": told.finished_sending, "finished_recving": told.finished_recving}
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**sides)))
        found = counting.aggregate(outputs).kv_connector_output
        assert (found.finished_sending, found.finished_recving) == ({"s"}, {"r"}), asked


if __name__ == "__main__":
    vllm_finds_it_by_its_name_and_by_its_path()
    pinned_blocks_are_not_given_away()
    requests_are_compared_by_all_that_decides_about_their_cache()
    counts_go_through_vllms_classes()
    reports_of_all_workers_complete_a_transfer_alone_and_beside_other_connectors()
