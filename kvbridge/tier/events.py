"""KV events: changes of a node's cached pages, for routers, in the format of vLLM and SGLang (`KVEventBatch`).

A `CacheFeed` compares the pages that it has told with the pages that are cached now. It goes over the records that the index marks
as changed, so nothing waits in a queue: a page that comes and goes between two looks is not told at all.

Each event is a map with `type` and the fields of vLLM's class of that name. A *hash* is the number that vLLM makes of its own
16-byte hashes: the last 8 bytes of a page's name (`Keys.in_namespace`), big-endian. Nodes do not know token ids, so `token_ids` is
empty. Group 0 are the pages that grow with the tokens. Group 1 are checkpoints: the windows and states at the end of a page,
without which a prefill node cannot go on there. They are told as a sliding window of one page, which asks a hit for its last page
alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from kvbridge.core.ids import IndexSpace
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.records import NO_RECORD, RecordArray
from kvbridge.tier.residence import Residence

Event = dict[str, Any]
Bits = npt.NDArray[np.uint8]

CLEARED: Event = {"type": "AllBlocksCleared"}


class _Kind(NamedTuple):
    """One kind of cached thing, whose events are told apart from those of other kinds."""

    residence: Residence
    medium: str
    is_checkpoint: bool

    def has(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        if self.is_checkpoint:
            return self.residence.checkpointed(records)
        return self.residence.has(records) & ~self.residence.lost(records)


class CacheFeed:
    """The events of one index. Used by the event loop's thread only."""

    def __init__(self, index: PrefixIndex, tokens_per_page: int, *, checkpoints: bool = True) -> None:
        """`checkpoints`: whether group 1 is told, too."""
        self._index, self._tokens_per_page = index, tokens_per_page
        device = "GPU" if IndexSpace.FULL in index.device.spaces else "CPU"
        places = [(index.device, device)] + ([] if index.host is None else [(index.host, "CPU")])
        self._kinds = [
            _Kind(*place, is_checkpoint) for is_checkpoint in (False, True)[: 1 + checkpoints] for place in places
        ]
        self._told = np.zeros(index.capacity, dtype=np.uint8)
        """By record, a bit for each kind."""
        self._told_hash = np.zeros(index.capacity, dtype=np.uint64)

    def changes(self) -> list[Event]:
        """Return the events since the last call: pages that have gone, then pages that have come, each behind its parent."""
        records = self._index.records.take_changed()
        if not len(records):
            return []
        now, hashes, before = self._now(records), self._hashes(records), self._told[records]
        renamed = self._told_hash[records] != hashes
        gone, come = before & ~np.where(renamed, 0, now), now & ~np.where(renamed, 0, before)
        events = self._removed(self._told_hash[records], gone)
        self._told[records], self._told_hash[records] = now, hashes
        if events and not self._told.any():
            events = [CLEARED]
        return events + self._stored(records, come)

    def snapshot(self) -> list[Event]:
        """Return events that tell a new listener all that `changes` has told so far."""
        records = np.flatnonzero(self._told).astype(np.int32)
        return [CLEARED, *self._stored(records, self._told[records])]

    def _now(self, records: RecordArray) -> Bits:
        found = np.zeros(len(records), dtype=np.uint8)
        there = ~self._index.records.is_hidden(records)
        for bit, kind in enumerate(self._kinds):
            found |= (kind.has(records) & there).astype(np.uint8) << bit
        return found

    def _hashes(self, records: RecordArray) -> npt.NDArray[np.uint64]:
        return np.frombuffer(self._index.records.keys(records).data, ">u8")[1::2].astype(np.uint64)

    def _removed(self, hashes: npt.NDArray[np.uint64], gone: Bits) -> list[Event]:
        found = [(kind, hashes[gone >> bit & 1 == 1].tolist()) for bit, kind in enumerate(self._kinds)]
        return [
            {"type": "BlockRemoved", "block_hashes": some, "medium": of.medium, "group_idx": int(of.is_checkpoint)}
            for of, some in found
            if some
        ]

    def _stored(self, records: RecordArray, come: Bits) -> list[Event]:
        return [
            self._stored_run(run, kind)
            for bit, kind in enumerate(self._kinds)
            for run in self._index.records.runs(records[come >> bit & 1 == 1])
        ]

    def _stored_run(self, run: RecordArray, kind: _Kind) -> Event:
        parent = self._index.records.parent[run[:1]]
        window = {"kv_cache_spec_sliding_window": self._tokens_per_page} if kind.is_checkpoint else {}
        return {
            "type": "BlockStored",
            "block_hashes": self._hashes(run).tolist(),
            "parent_block_hash": None if parent[0] == NO_RECORD else int(self._hashes(parent)[0]),
            "token_ids": [],
            "block_size": self._tokens_per_page,
            "lora_id": None,
            "medium": kind.medium,
            "lora_name": None,
            "group_idx": int(kind.is_checkpoint),
            "kv_cache_spec_kind": "sliding_window" if kind.is_checkpoint else "full_attention",
            **window,
        }


def encode_batch(unix_s: float, events: list[Event]) -> bytes:
    """Return a `KVEventBatch` of events that happened at a time."""
    encoded: bytes = msgpack.packb([unix_s, events])
    return encoded
