"""SGLang's transfer classes over kvbridge: manager, sender, receiver and directory. SGLang's schedulers call them.

A scheduler process has one manager for its rank. The first rank of a data-parallel group runs the node. The first rank of each
pipeline stage gives the node its orders. Every rank serves its own pools and hears the node's events. Only the start of a manager
raises, for the person who starts SGLang. A later error ends one request.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import sglang
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVTransferMetric,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from kvbridge.core.errors import BridgeError, PeerError
from kvbridge.core.ids import IndexSpace, PageTable, Role
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.node import START_S, Node, NodePlan, open_node
from kvbridge.engine.memory import AdoptedWorker
from kvbridge.engine.sglang.directory import Announcement, GroupNode, NodeDirectory, PrefillServers, generate
from kvbridge.engine.sglang.instance import Instance, read_instance
from kvbridge.engine.sglang.plugin import SHOWN
from kvbridge.engine.sglang.pools import instance_geometry, rank_regions, read_pools, require_nameable
from kvbridge.engine.sglang.rooms import ATTEMPT, FetchedRoom, MetadataRows, Prompt, Rooms, SentRoom, prompt_of, room_of
from kvbridge.telemetry.logs import leave_standard_output

SPACES = {"swa": IndexSpace.SWA, "c128_state": IndexSpace.REQUEST}
"""The index space of each kind of state pages, by the values of SGLang's `StateType`, whose names differ between releases."""
OTHER_RANK = "another rank of this server has failed the request, and says why in its log"
RoomT = TypeVar("RoomT", SentRoom, FetchedRoom)


class KvbridgeManager(BaseKVManager):
    """One rank's part of the node beside SGLang."""

    enable_deferred_decode_kv_release = True
    """SGLang keeps the pages of a failed request until `is_abort_release_safe` says so on every rank."""

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: ServerArgs,
        is_mla_backend: bool | None = False,
    ) -> None:
        """Start the node on the first rank, and serve this rank's pools to the node.

        Raises a BridgeError, in words for the person who starts SGLang.
        """
        leave_standard_output()
        (queue,) = SHOWN.get()
        role = Role.PREFILL if disaggregation_mode is DisaggregationMode.PREFILL else Role.DECODE
        self.kv_args = args
        self.metadata = MetadataRows(args.aux_data_ptrs, args.aux_item_lens)
        self.page_tokens = args.page_size
        self.enable_all_cp_ranks_for_transfer = False
        self._executor = ThreadPoolExecutor(1, "kvbridge-dp-ranks")
        self.held: dict[int, FetchedRoom] = {}
        """By SGLang's number, failed rooms whose pages SGLang keeps."""
        self.instance = instance = read_instance(role, server_args, get_parallel(), version=sglang.__version__)
        scheduler = queue.scheduler
        pools = read_pools(
            args,
            queue.token_to_kv_pool,
            window=getattr(scheduler, "sliding_window_size", 0) or 0,
            config=scheduler.model_config.hf_text_config.to_dict(),
            hisparse=role is Role.DECODE and scheduler.enable_hisparse,
        )
        require_nameable(pools, scheduler.model_config.context_len)
        self.supports_host_destination = all(buffer.in_host for buffer in pools.buffers)
        ranks = {instance.rank: pools}
        if instance.tp_size * instance.pp_size > 1:
            every = get_parallel().world_group.all_gather_object((instance.dp_rank, instance.rank, pools))
            ranks = {rank: told for group, rank, told in every if group == instance.dp_rank}
        forms = {"kv_cache_dtype": args.kv_cache_dtype_str, "kv_layout": getattr(args, "kv_layout", None) or "none"}
        cache = instance_geometry(
            ranks, name=instance.facts["model_path"], tp_size=instance.tp_size, facts={**instance.facts, **forms}
        )
        place = instance.place
        with ExitStack() as stack:
            if instance.runs_node:
                devices = {rank: told.device for rank, told in ranks.items()}
                node = open_node(NodePlan(place, cache, instance.tp_size, devices))
                stack.callback(node.close)
                if role is Role.PREFILL:
                    self._announcement = Announcement(instance.bootstrap_url, partial(_group_node, instance, node))
                    stack.callback(self._announcement.close)
            regions = rank_regions(cache.geometry, pools, instance.rank)
            self._serve = partial(AdoptedWorker, place.runtime_dir, instance.rank, regions)
            self._worker = self._serve()
            stack.callback(lambda: self._worker.close())  # noqa: PLW0108 - it may be another one by then
            attachment = NodeAttachment(role, place.runtime_dir, instance.led)
            stack.callback(attachment.close)
            attachment.begin()
            attachment.wait(2 * START_S)  # for the node, and then for the slowest rank
            self.guard = Guard(lambda _code: None)
            receives: Any = getattr(queue, "transfer_queue", None)  # decode's
            holds_back = hasattr(receives, "enable_deferred_kv_release")  # not in SGLang 0.5.17
            if holds_back:
                receives.enable_deferred_kv_release = True
                receives.deferred_kv_release_timeout = math.inf  # no timer frees a page
            self.rooms = Rooms(attachment, leads=bool(instance.led), holds_back=holds_back)
            self.rooms.look()
            self.prefill_info_table = PrefillServers() if role is Role.DECODE else {}
            self._closing = stack.pop_all()
        atexit.register(self.teardown)

    def look(self) -> None:
        """Take the node's events. An error here ends no request."""
        with self.guard.over("poll"):
            self.rooms.look()

    def register_to_bootstrap(self) -> None:
        """The announcement does that, again and again."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether the nodes of a prefill server are known; a thread asks for them."""
        return isinstance(self.prefill_info_table, PrefillServers) and self.prefill_info_table.name(bootstrap_addr)

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        """SGLang asks prefill servers here which group computes which room, where the room does not say so."""
        return self._executor

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nobody writes to the pages of a failed request any more. The rank that leads knows for all ranks."""
        self.look()
        held = self.held.get(bootstrap_room) if self.rooms.leads else None
        return held is None or not held.may_be_written

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self.held.pop(bootstrap_room, None)

    def computes(self, bootstrap_room: int) -> str:
        """Let decode know which group computes a room. Returns why decode would look for it elsewhere."""
        one = self.instance
        if one.dp_size == 1 or not bootstrap_room:
            return ""
        if not one.follows_room:
            if one.runs_node:
                self._announcement.computes(bootstrap_room)
            return ""
        group = bootstrap_room % one.dp_size
        return "" if group == one.dp_rank else f"group {one.dp_rank} has got it, and decode will ask group {group}"

    def room(self, kind: type[RoomT], bootstrap_room: int | None) -> RoomT:
        """Return the room of the request that a sender or a receiver is being made for. It has failed if it cannot be."""
        room = kind(0, Prompt(0, b""), self.rooms)
        with self.guard.over("prompt", str(bootstrap_room), lost=room.fail):
            room.prompt = prompt_of(SHOWN.get()[1], bootstrap_room or 0)
            room.id = room_of(bootstrap_room or 0, room.prompt.attempt)
        if not bootstrap_room:
            room.fail("bootstrap_room is 0 or missing: a router draws one at random for each request")
        return room

    def submit_prefill_recompute(self, kv_receiver: KvbridgeReceiver, payload: dict[str, Any]) -> None:
        """Have prefill compute the prompt of a request again whose KV cache decode has given up. `payload`: for `/generate`."""
        if self.rooms.leads:
            kv_receiver.recompute(payload)

    def deregister_buffer_to_engine(self) -> None:
        """Nothing reaches this rank's pools afterwards: SGLang gives their memory back. Requests that come before `register` wait.

        Raises as `AdoptedWorker.close` does, and SGLang ends: only the end of the process is safe then.
        """
        self._worker.close()
        self.rooms.give_up_all("the server has released its memory")
        self.held.clear()

    def register_buffer_to_engine(self) -> None:
        """SGLang has memory behind its pools again, at the same addresses."""
        self._worker = self._serve()

    def teardown(self) -> None:
        """Nothing of this process moves a byte afterwards, and no child of it is left."""
        self._closing.close()


def _group_node(instance: Instance, node: Node) -> GroupNode | None:
    try:
        control = node.endpoint().control
    except BridgeError:  # it is being started again
        return None
    group = {"dp_rank": instance.dp_rank, "dp_size": instance.dp_size, "follows_room": instance.follows_room}
    return None if control is None else GroupNode(address=control, http_port=instance.http_port, **group)


def _ends_its_room(method: Callable[..., None]) -> Callable[..., None]:
    """Have an error of a sender or a receiver end its request: an error that leaves the method would end SGLang's scheduler."""

    @wraps(method)
    def call(self: _OneRoom, *args: Any, **named: Any) -> None:
        with self.kv_mgr.guard.over(method.__name__, str(self._room.id), lost=self._room.stop):
            method(self, *args, **named)

    return call


class _OneRoom:
    """The part that senders and receivers share: the room of one request."""

    kv_mgr: KvbridgeManager
    _room: SentRoom | FetchedRoom

    def poll(self) -> int:
        self.kv_mgr.look()
        return self._room.poll

    poll_pp_consensus = poll

    def get_transfer_metric(self) -> KVTransferMetric:
        event = self._room.event
        if event is None:
            return KVTransferMetric()
        total_bytes = sum(amount.bytes for amount in event.amounts.values())
        return KVTransferMetric(transfer_latency_s=event.phases_s.get("transfer"), transfer_total_bytes=total_bytes)

    def failure_exception(self) -> None:
        """Raise the reason. SGLang calls this on every rank when one of them says that the room has failed."""
        self.kv_mgr.rooms.give_up(self._room, OTHER_RANK)
        raise PeerError(self._room.reason or OTHER_RANK)

    def clear(self) -> None:
        self.kv_mgr.rooms.forget(self._room)


class KvbridgeSender(_OneRoom, BaseKVSender):
    """The room of one request on prefill."""

    def __init__(
        self,
        mgr: KvbridgeManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
        **_: object,  # SGLang 0.5.17 names ranks, too
    ) -> None:
        self.kv_mgr = mgr
        self._early_send_wait_event: Any = None
        """Set by SGLang's overlap schedule for the next pages that are sent: a CUDA event after which they are final."""
        self._room: SentRoom = mgr.room(SentRoom, bootstrap_room)
        self._aux_index = 0
        if not req_has_disagg_prefill_dp_rank and (why_not := mgr.computes(bootstrap_room)):
            self._room.fail(f"bootstrap_room {bootstrap_room}: {why_not}")
        if not self._room.is_over:
            self._room.hold()

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._aux_index = aux_index or 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    @_ends_its_room
    def send(
        self,
        kv_indices: npt.NDArray[np.int32],
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        room, page_tokens = self._room, self.kv_mgr.page_tokens
        tokens = len(kv_indices) * page_tokens if num_kv_tokens is None else num_kv_tokens
        tables = {IndexSpace.FULL: room.next_table(kv_indices)}
        is_last = room.published + tokens >= room.prompt.tokens
        if is_last:
            tables |= _state_tables(self.kv_mgr, state_indices, room.prompt.tokens)
        final, self._early_send_wait_event = self._early_send_wait_event, None
        metadata = self.kv_mgr.metadata.read(self._aux_index) if is_last else None
        room.publish(tokens, tables, metadata, is_final=final.query if final else lambda: True)

    def failure_exception(self) -> None:
        self.clear()  # SGLang does not, on prefill
        super().failure_exception()

    def abort(self) -> None:
        self._room.stop("prefill's request was aborted")
        self.clear()


class KvbridgeReceiver(_OneRoom, BaseKVReceiver):
    """The room of one request on decode."""

    require_staging = False
    abort_notified = False
    bootstrap_infos: Sequence[Any] = ()

    def __init__(self, mgr: KvbridgeManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self._addr, self._number = bootstrap_addr, bootstrap_room or 0
        self._room: FetchedRoom = mgr.room(FetchedRoom, bootstrap_room)
        self._aux_index: int | None = None
        self._group = 0
        """The data-parallel rank of prefill that computes the prompt."""
        mgr.try_ensure_parallel_info(bootstrap_addr)

    @property
    def supports_host_destination(self) -> bool:
        return self.kv_mgr.supports_host_destination

    def is_abort_release_safe(self) -> bool:
        """Whether nobody writes to the pages of the request on the host any more."""
        self.kv_mgr.look()
        return not self._room.may_be_written

    @property
    def conclude_state(self) -> int | None:
        """SGLang reads it after `init`."""
        return int(self._room.state) if self._room.is_over else None

    @_ends_its_room
    def init(self, prefill_dp_rank: int) -> None:
        server = self.kv_mgr.prefill_info_table.get(self._addr)
        if self._room.is_over:
            return
        if server is None or prefill_dp_rank not in server.nodes:
            known = "is not known" if server is None else f"has groups {sorted(server.nodes)}"
            self._room.fail(
                f"the prefill server at {self._addr} {known}, and the request is for group {prefill_dp_rank}"
            )
            return
        self._group = prefill_dp_rank
        self._room.fetch([server.nodes[prefill_dp_rank]])

    @_ends_its_room
    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: str = "device",
        device_kv_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """`kv_indices` are pages of the host where that is the `destination`, and with HiSparse beside `device_kv_indices`."""
        room, prefix_tokens = self._room, decode_prefix_len or 0
        self._aux_index = aux_index
        first = prefix_tokens // self.kv_mgr.page_tokens
        pages = {IndexSpace.HOST if destination == "host" else IndexSpace.FULL: kv_indices}
        if device_kv_indices is not None:
            pages = {IndexSpace.HOST: kv_indices, IndexSpace.FULL: device_kv_indices}
        tables = {
            space: PageTable(space, np.ascontiguousarray(ids, dtype=np.int32), first) for space, ids in pages.items()
        }
        tables |= _state_tables(self.kv_mgr, state_indices, room.prompt.tokens)
        room.accept = self._accept
        room.provide(tables, prefix_tokens)

    @_ends_its_room
    def recompute(self, payload: dict[str, Any]) -> None:
        room, address, server = self._room, self._addr, self.kv_mgr.prefill_info_table.get(self._addr)
        payload["sampling_params"]["custom_params"] = {ATTEMPT: room.prompt.attempt}
        if server is not None and server.dp_size > 1:
            payload |= dict.fromkeys(("routed_dp_rank", "disagg_prefill_dp_rank"), self._group)

        def ask() -> None:
            if why_not := generate(address, server, payload):
                room.rooms.stop_soon(room, f"prefill did not compute the prompt again: {why_not}")

        threading.Thread(target=ask, name="kvbridge-recompute", daemon=True).start()

    def _accept(self, event: RoomEvent) -> None:
        rank = self.kv_mgr.instance.rank
        data = event.metadata.get(str(rank)) or next(iter(event.metadata.values()))
        if self._aux_index is not None:
            self.kv_mgr.metadata.write(self._aux_index, data)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang reads `abort_notified` afterwards, and keeps the pages of a failed request if any rank says so."""
        self.abort_notified = self._room.may_be_written
        if self.abort_notified:
            self.kv_mgr.held[self._number] = self._room

    def abort(self) -> None:
        self._room.stop("decode's request was aborted")


def _state_tables(manager: KvbridgeManager, indices: list[Any] | None, tokens: int) -> dict[IndexSpace, PageTable]:
    """Return the pages of windows and states, which SGLang names in the order of its state types. A window's are the last ones."""
    tables = {}
    for kind, ids in zip(manager.kv_args.state_types, indices or (), strict=False):
        if (space := SPACES.get(kind.value)) and ids is not None:
            pages = np.ascontiguousarray(ids, dtype=np.int32)
            first = max(0, -(-tokens // manager.page_tokens) - len(pages)) if space is IndexSpace.SWA else 0
            tables[space] = PageTable(space, pages, first)
    return tables


CLASSES = {
    "kvargs": KVArgs,
    "manager": KvbridgeManager,
    "sender": KvbridgeSender,
    "receiver": KvbridgeReceiver,
    "bootstrap_server": NodeDirectory,
}
"""By the values of SGLang's `KVClassType`."""
