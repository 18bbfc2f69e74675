"""One side of a transfer of DeepSeek-V4's pools between two nodes, without schedulers. Runs in SGLang's environment.

SGLang's own code makes the manager's arguments (`_init_kv_manager`), names the pages of a request on prefill (`_send_kv_chunk`) and
on decode (`pop_preallocated`), and asks kvbridge's sender and receiver. This file stands for the rest of the schedulers: it says
where the tokens of a request are, and polls. Decode compares all memory after each batch of rooms, and prints the bytes that it
compared.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.plugins import load_plugins

from tests.sglang import v4_pools
from tests.sglang.v4_pools import HOST_ROWS, PAGE_TOKENS, PAGES, SLOTS, WINDOW_PAGES, Off

LIMIT_S = 120.0
CHUNK_TOKENS = 512
BATCH = 8
LONGEST = 4 * PAGE_TOKENS
HOST = "127.0.0.1"
ROLES = ("prefill", "decode")
Places = dict[str, dict[int, int]]
"""The pages of a request: by space the id of each page that it has, by the page's number in the prompt."""


def draw(random: np.random.Generator, rooms: Sequence[tuple[int, int]], *, nextn: bool) -> list[Places]:
    """Give each room of a batch pages and a slot of its own, in no order. Both sides can draw what either draws."""
    rings = 2 if nextn else 1  # pages of a slot
    pages, windows = (iter(random.permutation(np.arange(1, size)).tolist()) for size in (PAGES, WINDOW_PAGES))
    found: list[Places] = []
    for slot, (_, tokens) in zip(random.permutation(SLOTS).tolist(), rooms, strict=False):
        last, first_window = -(-tokens // PAGE_TOKENS), max(0, tokens - v4_pools.WINDOW) // PAGE_TOKENS
        full = {page: next(pages) for page in range(last)}
        swa = {page: next(windows) for page in range(first_window, last)}
        state = slot * rings + (tokens - 1) % (128 * rings) // 128
        found.append({"full": full, "swa": swa, "request": {0: state}, "slot": {0: slot}})
    return found


@dataclass
class World:
    """The processes of a server's pipeline stages."""

    directory: Path
    stage: int
    stages: int

    def all_gather_object(self, told: Any) -> list[Any]:
        """Exchange objects by files."""
        mine = self.directory / f"stage-{self.stage}.new"
        mine.write_bytes(pickle.dumps(told))
        mine.rename(mine.with_suffix(""))
        theirs = [self.directory / f"stage-{stage}" for stage in range(self.stages)]
        until("all stages have told", lambda: all(path.exists() for path in theirs))
        return [pickle.loads(path.read_bytes()) for path in theirs]


class Side:
    """The common part of both sides: SGLang's settings, the place of each token, and metadata."""

    def __init__(self, asked: dict[str, Any]) -> None:
        role, stage = asked["role"], asked["stage"]
        stages = asked["stages"] if role == "prefill" else 1
        self.draft: Any = None
        self.hisparse = asked["form"] == "hisparse" and role == "decode"
        self.nextn = asked["form"] == "nextn"
        self.build(stage, stages)
        self.random = np.random.default_rng([ROLES.index(role)])
        self.metadata = utils.MetadataBuffers(SLOTS, 16, torch.float32, 0)
        self.req_to_token = torch.zeros((SLOTS, LONGEST), dtype=torch.int64)
        self.to_window = torch.zeros(PAGES * PAGE_TOKENS, dtype=torch.int64)
        self.allocator = SimpleNamespace(
            page_size=PAGE_TOKENS,
            hisparse_page_size=HOST_ROWS,
            hisparse_attn_allocator=SimpleNamespace(available_size=lambda: 1 << 20),
            get_kvcache=lambda: self.pool,
            translate_kv_indices_for_transfer=lambda ids: ids,
            translate_swa_indices_for_transfer=lambda ids: self.to_window[ids],
        )
        self.bootstrap_port = asked["bootstrap_port"]
        disagg = SimpleNamespace(
            disaggregation_transfer_backend="kvbridge",
            disaggregation_ib_device=None,
            disaggregation_decode_host_receive_threshold=self.threshold,
            disaggregation_decode_allocation_policy="early",
            disaggregation_decode_enable_radix_cache=False,
        )
        parallel = SimpleNamespace(
            **{f"{axis}_size": 1 for axis in ("attn_tp", "attn_cp", "tp", "dp")},
            **{f"{axis}_rank": 0 for axis in ("attn_tp", "attn_dp", "tp", "dp")},
            pp_size=stages,
            pp_rank=stage,
            world_group=World(Path(asked["directory"]), stage, stages),
            enable_dp_attention=False,
            enable_dsa_cache_layer_split=False,
        )
        from kvbridge.engine.sglang import backend

        for module in (prefill, decode, utils, backend):
            module.get_disagg, module.get_parallel = lambda: disagg, lambda: parallel
            module.get_device = lambda: SimpleNamespace(gpu_id=0)
        self.scheduler = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(kv_cache_dtype_str="fp8_e4m3")),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(to_dict=lambda: v4_pools.CONFIG),
                num_hidden_layers=len(v4_pools.RATIOS),
                context_len=LONGEST,
                get_total_num_kv_heads=lambda: 2,
            ),
            server_args=SimpleNamespace(
                host=HOST,
                port=asked["port"],
                disaggregation_bootstrap_port=self.bootstrap_port,
                load_balance_method="follow_bootstrap_room",
                model_path="flash",
                revision=None,
                quantization=None,
                dtype="auto",
                attention_backend=None,
                enable_dp_attention=False,
                nnodes=1,
            ),
            sliding_window_size=v4_pools.WINDOW,
            req_to_token_pool=SimpleNamespace(
                req_to_token=self.req_to_token, available_size=lambda: SLOTS, max_context_len=PAGE_TOKENS
            ),
            rust_server=None,
            metrics_reporter=Off(),
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: SimpleNamespace(full_token_usage=0.0)),
            enable_hisparse=self.hisparse,
            enable_staging=False,
        )
        self.common = {
            "transfer_backend": utils.TransferBackend("kvbridge"),
            "scheduler": self.scheduler,
            "token_to_kv_pool": self.pool,
            "draft_token_to_kv_pool": self.draft,
            "metadata_buffers": self.metadata,
            "is_mla_backend": self.is_mla,
            "enable_staging": False,
            "tp_rank": 0,
            "pp_rank": stage,
        }

    is_mla = True
    tree: Any = None
    """SGLang's tree of prefixes, which has the pools on the host."""
    threshold = 1
    """The share of the device in use from which on SGLang receives on the host."""
    in_host: Collection[str] = ()
    """Kinds that decode has on the host."""

    def build(self, stage: int, stages: int) -> None:
        """Make the pools."""
        every = len(v4_pools.RATIOS)
        layers = range(stage * every // stages, (stage + 1) * every // stages)
        self.pool, self.draft = self.pools(hisparse=self.hisparse, layers=layers)
        self.host = v4_pools.host_pool(self.pool) if self.hisparse else None
        self.in_host = {"c4_kv"} if self.hisparse else ()
        self.forms, self.memory = v4_pools.forms(nextn=self.nextn), v4_pools.memory(self.pool, self.host, self.draft)

    def of_prefill(self) -> dict[tuple[str, int], v4_pools.Bytes]:
        """Return memory like that of all stages of prefill."""
        pool, draft = self.pools()
        return v4_pools.memory(pool, draft=draft)

    def pools(self, *, hisparse: bool = False, layers: range | None = None) -> tuple[Any, Any]:
        """Return the pool of the model, and that of its NextN layer."""
        draft = v4_pools.made(nextn=True, ratios=[0]) if self.nextn else None
        return v4_pools.made(hisparse=hisparse, nextn=self.nextn, layers=layers), draft

    def requests(self, rooms: Sequence[tuple[int, int]]) -> list[Any]:
        """Return a batch of requests whose tokens have places."""
        return [
            self._request(room, tokens, places)
            for (room, tokens), places in zip(rooms, draw(self.random, rooms, nextn=self.nextn), strict=True)
        ]

    def _request(self, room: int, tokens: int, places: Places) -> Any:
        slot = places["slot"][0]
        for page, at in places["full"].items():
            inside = torch.arange(PAGE_TOKENS)
            self.req_to_token[slot, page * PAGE_TOKENS + inside] = at * PAGE_TOKENS + inside
            self.to_window[at * PAGE_TOKENS + inside] = places["swa"].get(page, 0) * PAGE_TOKENS + inside
        return SimpleNamespace(
            rid=str(room),
            bootstrap_room=room,
            bootstrap_host=HOST,
            bootstrap_port=self.bootstrap_port,
            origin_input_ids=list(range(tokens)),
            extend_end=tokens,
            output_ids=[room % 1000],
            kv=SimpleNamespace(req_pool_idx=slot, retraction_backup=None),
            metadata_buffer_index=slot,
            pages=places,
            sampling_params=SimpleNamespace(max_new_tokens=1, custom_params=None),
            time_stats=SimpleNamespace(set_decode_transfer_queue_entry_time=lambda: None),
            **dict.fromkeys(("lora_id", "extra_key", "disagg_prefill_dp_rank", "finished_reason"), None),
            **dict.fromkeys(("start_send_idx", "disagg_decode_prefix_len"), 0),
        )


def until(what: str, look: Any) -> None:
    """Wait until `look` is true."""
    deadline_s = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < deadline_s, f"{what}: not within {LIMIT_S:g} s"
        time.sleep(0.001)


def ended(ends: Sequence[Any]) -> bool:
    """Whether all senders or receivers are over. Raises what one of them failed with."""
    polls = [end.poll() for end in ends]
    for end, poll in zip(ends, polls, strict=True):
        if poll == 0:
            end.failure_exception()
    return all(poll == 4 for poll in polls)


# ---------------------------------------------------------------------------------------------- prefill


class Prefill(Side):
    """Fills all memory once, and sends."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__(asked)
        if not self.common["pp_rank"]:
            directory = utils.get_kv_class(self.common["transfer_backend"], utils.KVClassType.BOOTSTRAP_SERVER)
            directory(HOST, self.bootstrap_port)
        self.queue = object.__new__(prefill.PrefillBootstrapQueue)
        vars(self.queue).update(
            self.common,
            bootstrap_port=self.bootstrap_port,
            _check_if_req_exceed_kv_capacity=lambda _: False,
            _process_req=lambda _: None,
        )
        self.queue.kv_manager = self.queue._init_kv_manager()
        vars(self.scheduler).update(
            token_to_kv_pool_allocator=self.allocator,
            token_to_kv_pool=self.pool,
            disagg_metadata_buffers=SimpleNamespace(set_buf=self._set_metadata),
            disagg_prefill_bootstrap_queue=self.queue,
            disagg_prefill_pending_chunk_rids=set(),
        )
        for (kind, layer), pages in self.memory.items():
            fill(pages, -1, kind, layer)

    def _set_metadata(self, request: Any) -> None:
        row = request.metadata_buffer_index
        self.metadata.output_ids[row][0] = request.output_ids[0]
        self.metadata.bootstrap_room[row, 0] = request.bootstrap_room

    def run(self, rooms: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(rooms), BATCH):
            requests = self.requests(rooms[begin : begin + BATCH])
            for request in requests:
                assert self.queue.create_sender(request, 1)
                request.disagg_kv_sender.init(len(request.pages["full"]), request.metadata_buffer_index)
                tokens = len(request.origin_input_ids)
                for stop in range(CHUNK_TOKENS, tokens, CHUNK_TOKENS):
                    self._send(request, False, stop)
                self._send(request, True, None)
            senders = [request.disagg_kv_sender for request in requests]
            until("prefill's rooms end", lambda: ended(senders))  # noqa: B023 - called here only
            for sender in senders:
                sender.clear()

    def _send(self, request: Any, last: bool, stop: int | None) -> None:
        prefill.SchedulerDisaggregationPrefillMixin._send_kv_chunk(self.scheduler, request, last, stop)


def fill(pages: v4_pools.Bytes, number: int, kind: str, layer: int) -> None:
    """Write a pattern that both sides can make. Number -1 is that of prefill, others are those of decode's batches."""
    pattern = np.random.default_rng([number + 1, crc32(kind.encode()), layer])
    pages[:] = pattern.integers(0, 256, pages.shape, dtype=np.uint8)


# ---------------------------------------------------------------------------------------------- decode


class Queue(decode.DecodePreallocQueue):
    """SGLang's queue on decode with room for everything. `pop_preallocated` names the pages of requests, as on a server."""

    def __init__(self, side: Decode) -> None:
        vars(self).update(side.common)
        self.side, self.queue, self.pp_size = side, [], 1
        self.req_to_token_pool = side.scheduler.req_to_token_pool
        self.token_to_kv_pool_allocator = side.allocator
        self.transfer_queue = SimpleNamespace(queue=[], enable_staging=False)
        self.tree_cache = side.tree
        self._num_published_destinations = 0
        self.kv_manager = self._init_kv_manager()

    def _resolve_pending_reqs(self) -> None: ...

    def _update_handshake_waiters(self, *_: Any) -> None: ...

    def _uses_swa_tail_prealloc(self) -> bool:
        return False

    _uses_swa_reservation = _uses_swa_tail_prealloc

    def _hicache_pending_restore_tokens(self) -> int:
        return 0

    def _allocatable_token_budgets(self, **_: Any) -> int:
        return 1 << 30

    def _required_alloc_tokens(self, **_: Any) -> int:
        return 0

    def _required_admission_tokens(self, *_: Any) -> int:
        return 0

    def _prealloc_reservation_fits(self, *_: Any, **__: Any) -> bool:
        return True

    def _pre_alloc_fill_len(self, req: Any) -> int:
        return len(req.origin_input_ids)

    _rebootstrap_prefill_len = _pre_alloc_fill_len

    @property
    def req_to_metadata_buffer_idx_allocator(self) -> Any:
        """Rows are the requests' slots."""
        rows = (each.req.metadata_buffer_index for each in self.queue if each.metadata_buffer_index < 0)
        return SimpleNamespace(available_size=lambda: SLOTS, alloc=lambda: next(rows))

    def _pre_alloc(self, req: Any, *_: Any) -> torch.Tensor:
        """Return the places of a prompt's compressed rows on the host, where HiSparse has them; else those of its tokens."""
        side, tokens = self.side, len(req.origin_input_ids)
        if side.host is None:
            return side.req_to_token[req.kv.req_pool_idx, :tokens]
        return side.host_slots(req, tokens // 4)


class Decode(Side):
    """Receives, and compares."""

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__(asked)
        vars(self.scheduler).update(
            running_batch=SimpleNamespace(reqs=[]),
            hisparse_coordinator=SimpleNamespace(
                mem_pool_host=self.host, padded_buffer_size=1, spec_swap=SimpleNamespace(scratch_capacity=0)
            ),
            **dict.fromkeys(("enable_priority_scheduling", "enable_lora", "enable_decode_hicache"), False),
        )
        decode.ensure_mamba_capacity = lambda *_: True
        self.queue = Queue(self)
        self.source = self.of_prefill()
        for (kind, layer), pages in self.source.items():
            fill(pages, -1, kind, layer)
        self.compared = dict.fromkeys(self.forms, 0)

    def host_slots(self, request: Any, rows: int) -> torch.Tensor:
        """Give a request places in the host pool, by the pool's own allocator."""
        assert self.host is not None
        slots = torch.full((SLOTS, LONGEST), -1, dtype=torch.int64)
        given = self.host.alloc_paged_token_slots(
            slots, torch.zeros(SLOTS, dtype=torch.int64), request.kv.req_pool_idx, 0, rows
        )
        request.pages["host"] = {
            page: int(given[page * HOST_ROWS]) // HOST_ROWS for page in range(-(-rows // HOST_ROWS))
        }
        request.host_slots = slots[request.kv.req_pool_idx]
        return given

    def run(self, rooms: Sequence[tuple[int, int]]) -> None:
        theirs = np.random.default_rng([ROLES.index("prefill")])
        for begin in range(0, len(rooms), BATCH):
            batch = rooms[begin : begin + BATCH]
            requests = self.requests(batch)
            for (kind, layer), pages in self.memory.items():
                fill(pages, begin, kind, layer)
            self.clear(requests)
            before = {key: pages.copy() for key, pages in self.memory.items()}
            waiting = [self.queue._create_receiver_and_enqueue(request) for request in requests]
            for each in waiting:
                address = f"{HOST}:{self.bootstrap_port}"
                until("prefill is known", lambda: self.queue.kv_manager.try_ensure_parallel_info(address))  # noqa: B023
                each.kv_receiver.init(0)
                each.waiting_for_input = True
            popped, failed = self.queue.pop_preallocated()
            assert (len(popped), failed, self.queue.queue) == (len(requests), [], [])
            assert self.queue.transfer_backend is self.common["transfer_backend"]
            receivers = [each.kv_receiver for each in waiting]
            until("decode's rooms end", lambda: ended(receivers))  # noqa: B023
            self._compare(requests, draw(theirs, batch, nextn=self.nextn), before)
            for each in waiting:
                each.kv_receiver.clear()
                self.release(each.req)

    def clear(self, requests: Sequence[Any]) -> None:
        """Clear the states of requests before memory is looked at. SGLang does so, too, when it names their pages."""
        for request in requests:
            self.pool.clear_request_scoped_state(request.kv.req_pool_idx)

    def release(self, request: Any) -> None:
        if self.host is not None:
            self.host.free(request.host_slots[request.host_slots >= 0])

    def _compare(
        self, requests: Sequence[Any], sources: Sequence[Places], before: dict[tuple[str, int], v4_pools.Bytes]
    ) -> None:
        for request in requests:
            row = request.metadata_buffer_index
            assert int(self.metadata.output_ids[row][0]) == request.output_ids[0]
            assert int(self.metadata.bootstrap_room[row][0]) == request.bootstrap_room
        for (kind, layer), now in self.memory.items():
            form, source = self.forms[kind], self.source[kind, layer]
            changed = now != before[kind, layer]
            for request, places in zip(requests, sources, strict=True):
                tokens, theirs = len(request.origin_input_ids), places[form.space]
                ours = request.pages["host" if kind in self.in_host else form.space]
                masks = form.masks(tokens)
                for page, at in ours.items():
                    same = now[at] == source[theirs[page]]
                    wrong = int((~same)[masks[page]].sum()) if page in masks else 0
                    assert not wrong, f"{wrong} bytes of {kind}, layer {layer}, page {page} of {tokens} tokens differ"
                    self.compared[kind] += int(masks[page].sum()) if page in masks else 0
                    changed[at] &= ~same  # dead rows between live ones may be copied along
                assert masks.keys() <= ours.keys(), f"{kind}: a page that {tokens} tokens need was not named"
            assert not changed.any(), (
                f"{kind}, layer {layer}: bytes of nobody changed in pages {np.flatnonzero(changed.any(1))}"
            )


def main(prefill: type[Prefill] = Prefill, decode: type[Decode] = Decode) -> None:
    """Run one process: JSON as its argument."""
    asked = json.loads(sys.argv[1])
    load_plugins()
    side = {"prefill": prefill, "decode": decode}[asked["role"]](asked)
    side.run([(room, tokens) for room, tokens in asked["rooms"]])
    side.queue.kv_manager.teardown()
    if isinstance(side, Decode):
        print(json.dumps(side.compared))


if __name__ == "__main__":
    main()
