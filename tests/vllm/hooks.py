"""What vLLM itself says of the connector class, without a server. Run by vLLM's Python; prints one JSON object.

Owns: the questions. `test_connector_hooks.py` has the answers that are wanted.
"""

from __future__ import annotations

import inspect
import json
import time
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvbridge.engine.adapters import vllm as plugin
from kvbridge.engine.adapters.vllm import connector
from kvbridge.engine.adapters.vllm.connector import KvbridgeConnector, KvbridgeWorkerMetadata
from kvbridge.engine.adapters.vllm.metrics import KvbridgeStats
from kvbridge.engine.adapters.vllm.prefill_rooms import BlockPins
from kvbridge.engine.adapters.vllm.stats import add_counts, no_counts


def names() -> dict[str, Any]:
    """Whether vLLM finds the class by both ways."""
    load_general_plugins()
    plugin.register()
    module = SimpleNamespace(kv_connector=plugin.NAME, kv_connector_module_path=connector.__name__)
    return {
        "by_name": KVConnectorFactory.get_connector_class_by_name(plugin.NAME) is KvbridgeConnector,
        "by_path": KVConnectorFactory.get_connector_class(module) is KvbridgeConnector,
        "supports_hma": supports_hma(KvbridgeConnector),
        "abstract": sorted(KvbridgeConnector.__abstractmethods__),
    }


def signatures() -> dict[str, Any]:
    """Hooks whose parameters are not vLLM's, and hooks that vLLM does not have."""
    different, own = [], []
    for name, ours in vars(KvbridgeConnector).items():
        if name.startswith("_") or not (inspect.isfunction(ours) or isinstance(ours, classmethod)):
            continue
        theirs = getattr(KVConnectorBase_V1, name, None)
        if theirs is None:
            own.append(name)
        elif list(inspect.signature(getattr(KvbridgeConnector, name)).parameters) != list(
            inspect.signature(theirs).parameters
        ):
            different.append(name)
    return {"different": sorted(different), "own": sorted(own)}


def pins() -> dict[str, int]:
    """Free blocks of vLLM's pool: at first, while blocks are a request's, when it has freed them but we have not, and at last."""
    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=128)
    held = BlockPins(pool)
    at_first = pool.get_num_free_blocks()
    blocks = pool.get_new_blocks(3)
    taken = pool.get_num_free_blocks()
    held.pin([block.block_id for block in blocks])
    pool.free_blocks(reversed(blocks))
    pinned = pool.get_num_free_blocks()
    held.unpin([block.block_id for block in blocks])
    return {"at_first": at_first, "taken": taken, "pinned": pinned, "at_last": pool.get_num_free_blocks()}


def request(tokens: list[int] | None, **fields: Any) -> Request:
    """A request as vLLM makes it of what a gateway sends."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    return Request("r", tokens, params, None, **fields)


def prompts() -> dict[str, Any]:
    """What is compared of requests."""
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    digests = [
        connector._told(made).prompt_digest
        for made in (
            request([1, 2, 3]),
            request([1, 2, 3], cache_salt="s"),
            request([1, 2, 3], lora_request=lora),
            request([1, 2, 4]),
        )
    ]
    long = request(list(range(8_192)))
    began_s = time.perf_counter()
    connector._told(long)
    return {
        "distinct": len(set(digests)),
        "again": connector._told(request([1, 2, 3])).prompt_digest == digests[0],
        "params": connector._told(request([1])).params,
        "seconds_for_8192": time.perf_counter() - began_s,
    }


def numbers() -> dict[str, Any]:
    """Counts on their way through vLLM's classes."""
    counts = no_counts() | {"seconds": [0.5], "bytes": [1 << 20], "operations": [4], "held_rooms": 2, "held_blocks": 7}
    counts["failures"] = {"unknown_room": 3}
    stats = KvbridgeConnector.build_kv_connector_stats(json.loads(json.dumps(counts)))
    both = stats.aggregate(KvbridgeStats(json.loads(json.dumps(counts))))
    kinds = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    shown = KvbridgeConnector.build_prom_metrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    shown.observe(both.to_dict(), 0)
    lines = generate_latest(REGISTRY).decode().splitlines()
    ours = [line for line in lines if line.startswith("vllm:kvbridge_") and "_created" not in line]
    return {
        "empty": KvbridgeStats().is_empty(),
        "full": not both.is_empty(),
        "added": both.data == add_counts(counts, counts),
        "line": both.reduce(),
        "metrics": [line for line in ours if "_bucket" not in line],
    }


def workers() -> dict[str, Any]:
    """What several workers say together."""
    told = KvbridgeWorkerMetadata({0: {"prefill": ("a",)}}).aggregate(KvbridgeWorkerMetadata({1: {"prefill": ("a",)}}))
    aggregator = KVOutputAggregator(KvbridgeConnector.get_finished_count(SimpleNamespace()))
    return {"closed_by": sorted(told.closed), "reports": aggregator._expected_finished_count}


if __name__ == "__main__":
    asked = (names, signatures, pins, prompts, numbers, workers)
    print(json.dumps({question.__name__: question() for question in asked}))
