"""vLLM's classes for the counts of transfers: one that adds them up, one that shows them to Prometheus under their names."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvbridge.engine.adapters.vllm.stats import BUCKETS_BYTES, BUCKETS_S, add_counts, is_nothing, no_counts, summary

BUCKETS = {"load_seconds": BUCKETS_S, "load_bytes": BUCKETS_BYTES}
DOCUMENTATION = {
    "load_seconds": "From naming the blocks of a request until its KV cache is in them.",
    "load_bytes": "KV cache loaded for a request.",
    "load_operations": "Copies between machines that loads were made of.",
    "sent": "Requests whose KV cache decode has taken from here.",
    "held_requests": "Finished requests whose blocks wait for decode.",
    "held_blocks": "Their blocks.",
}


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
