"""One side of transfers into host memory that SGLang names (`--disaggregation-decode-host-receive-threshold 0`)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from tests.sglang import v4_transfer
from tests.sglang.v4_pools import PAGE_TOKENS, PAGES, Bytes, Form
from tests.sglang.v4_transfer import Side, until

LAYERS, HEADS, WIDTH = 3, 2, 16
ROW_BYTES = HEADS * WIDTH * 4


def _rows(tokens: int) -> dict[int, np.ndarray]:
    pages = range(-(-tokens // PAGE_TOKENS))
    return {page: np.arange(min(PAGE_TOKENS, tokens - page * PAGE_TOKENS)) for page in pages}


def _memory(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dict[tuple[str, int], Bytes]:
    named = {"key": keys, "value": values}
    return {
        (kind, layer): tensor.view(torch.uint8).reshape(-1, PAGE_TOKENS * ROW_BYTES).numpy()
        for kind, tensors in named.items()
        for layer, tensor in enumerate(tensors)
    }


class Attention(Side):
    """Pools of multi-head attention."""

    is_mla = False

    def build(self, stage: int, stages: int) -> None:
        self.pool = self._made()
        form = Form("full", PAGE_TOKENS * ROW_BYTES, PAGE_TOKENS, (ROW_BYTES,), _rows)
        self.forms = {"key": form, "value": form}
        self.memory, self.host = self.of_prefill(self.pool), None

    def of_prefill(self, pool: Any = None) -> dict[tuple[str, int], Bytes]:
        pool = pool or self._made()
        return _memory(pool.k_buffer, pool.v_buffer)

    def _made(self) -> Any:
        size = (PAGES - 1) * PAGE_TOKENS
        return MHATokenToKVPool(size, PAGE_TOKENS, torch.float32, HEADS, WIDTH, LAYERS, "cpu", False)


class Prefill(Attention, v4_transfer.Prefill):
    """Sends from the device's pool."""


class Decode(Attention, v4_transfer.Decode):
    """Receives in the pool of HiCache on the host, which SGLang's own code gives to requests."""

    threshold = 0
    in_host = ("key", "value")

    def build(self, stage: int, stages: int) -> None:
        super().build(stage, stages)
        host = MHATokenToKVPoolHost(
            self.pool._mha_buffer_info(),
            1.0,
            0,
            PAGE_TOKENS,
            "layer_first",
            pin_memory=False,
            device_capacity_tokens=self.pool.size,
            start_layer=0,
            end_layer=LAYERS,
        )
        group = HostPoolGroup(
            [PoolEntry(PoolName.KV, host, self.pool, lambda layer: layer, is_primary_index_anchor=True)]
        )
        self.tree = SimpleNamespace(host_pool_group=group, sidecar_pool_specs=[], disable=True)
        self.memory = {**self.memory, **_memory(host.k_data_refs, host.v_data_refs)}
        self.received = host

    def clear(self, requests: Sequence[Any]) -> None:
        """There are no states."""

    def _compare(self, requests: Sequence[Any], *about: Any) -> None:
        for request in requests:
            places = request.kv.retraction_backup.host_indices[::PAGE_TOKENS] // PAGE_TOKENS
            request.pages["host"] = dict(enumerate(places.tolist()))
        super()._compare(requests, *about)

    def release(self, request: Any) -> None:
        self.received.free(request.kv.retraction_backup.host_indices)

    def run(self, rooms: Sequence[tuple[int, int]]) -> None:
        """At last a request is given up whose prompt never comes: SGLang gets its pages back when it asks."""
        super().run(rooms)
        [request] = self.requests([(rooms[-1][0] + 1, PAGE_TOKENS)])
        waiting = self.queue._create_receiver_and_enqueue(request)
        waiting.kv_receiver.init(0)
        waiting.waiting_for_input = True
        self.queue.pop_preallocated()
        receiver = waiting.kv_receiver
        assert waiting.host_staged
        assert not receiver.is_abort_release_safe()
        receiver.abort()
        until("nobody writes to the host any more", receiver.is_abort_release_safe)
        until("the room has failed", lambda: receiver.poll() == 0)


if __name__ == "__main__":
    v4_transfer.main(Prefill, Decode)
