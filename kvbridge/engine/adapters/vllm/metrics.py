"""vLLM's classes for the counts of transfers: one that adds them up, one that shows them to Prometheus under their names."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvbridge.engine.adapters.vllm.stats import BUCKETS_BYTES, BUCKETS_S, add_counts, is_nothing, no_counts, summary


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
        self._seconds = self._made(
            self._histogram_cls,
            "load_seconds",
            "From naming the blocks of a request until its KV cache is in them.",
            buckets=BUCKETS_S,
        )
        self._bytes = self._made(
            self._histogram_cls, "load_bytes", "KV cache loaded for a request.", buckets=BUCKETS_BYTES
        )
        self._operations = self._made(
            self._counter_cls, "load_operations", "Copies between machines that loads were made of."
        )
        self._sent = self._made(self._counter_cls, "sent", "Requests whose KV cache decode has taken from here.")
        self._held_rooms = self._made(
            self._gauge_cls, "held_requests", "Finished requests whose blocks wait for decode."
        )
        self._held_blocks = self._made(self._gauge_cls, "held_blocks", "Their blocks.")
        self._failures = self._counter_cls(
            name="vllm:kvbridge_failures",
            documentation="Loads and held requests that ended otherwise, and errors of hooks, by code.",
            labelnames=[*self._labelnames, "code"],
        )

    def _made(self, kind: Any, name: str, documentation: str, **more: Any) -> dict[int, Any]:
        if kind is self._gauge_cls:
            more["multiprocess_mode"] = "mostrecent"
        metric = kind(name=f"vllm:kvbridge_{name}", documentation=documentation, labelnames=self._labelnames, **more)
        found: dict[int, Any] = create_metric_per_engine(metric, self.per_engine_labelvalues)
        return found

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        counts = transfer_stats_data
        for seconds in counts["seconds"]:
            self._seconds[engine_idx].observe(seconds)
        for size in counts["bytes"]:
            self._bytes[engine_idx].observe(size)
        self._operations[engine_idx].inc(sum(counts["operations"]))
        self._sent[engine_idx].inc(counts["sent"])
        if counts["held_rooms"] is not None:
            self._held_rooms[engine_idx].set(counts["held_rooms"])
            self._held_blocks[engine_idx].set(counts["held_blocks"])
        for code, count in counts["failures"].items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], code).inc(count)
