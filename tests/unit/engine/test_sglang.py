"""The parts of the SGLang adapter: rooms, rows of metadata, the member of the enum; and what its classes do with any request."""

from __future__ import annotations

import importlib
import queue
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from enum import Enum
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import PeerError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import MAX_ROOM, MOST_PAGES, IndexSpace, Rank, Role
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.kit import Guard
from kvbridge.engine.sglang.instance import read_instance
from kvbridge.engine.sglang.plugin import SHOWN, add_member
from kvbridge.engine.sglang.pools import (
    Buffer,
    RankPools,
    instance_geometry,
    rank_regions,
    require_nameable,
    require_paged_v4,
)
from kvbridge.engine.sglang.rooms import (
    ATTEMPT,
    FetchedRoom,
    MetadataRows,
    Poll,
    Prompt,
    Rooms,
    SentRoom,
    prompt_of,
    room_of,
)
from kvbridge.worker.lifecycle import UnclosedError
from tests.helpers.cluster import eventually

NODE = [PeerAddress(endpoint="tcp://127.0.0.1:7")]


class Attachment:
    """Records what is said, and says what a test has put into `due`."""

    def __init__(self) -> None:
        self.node = "a"
        self.said: list[tuple[str, int]] = []
        self.due: list[RoomEvent] = []

    def say(self, kind: type, room: int, **_: Any) -> bool:
        if self.node:
            self.said.append((kind.__name__, room))
        return bool(self.node)

    def leave(self) -> None:
        self.node = ""

    def events(self) -> list[RoomEvent]:
        found, self.due = self.due, []
        return found


@pytest.fixture
def attachment() -> Attachment:
    return Attachment()


@pytest.fixture
def rooms(attachment: Attachment, monkeypatch: pytest.MonkeyPatch) -> Rooms:
    monkeypatch.setattr("kvbridge.engine.sglang.rooms.LOOK_S", 0.0)
    return Rooms(attachment, leads=True)  # type: ignore[arg-type]


def sent(rooms: Rooms, room: int = 1) -> SentRoom:
    made = SentRoom(room, Prompt(40, b"d"), rooms)
    made.hold()
    return made


def fetched(rooms: Rooms, room: int = 1) -> FetchedRoom:
    made = FetchedRoom(room, Prompt(40, b"d"), rooms)
    made.fetch(NODE)
    return made


def publish(room: SentRoom, tokens: int, metadata: bytes | None = None) -> None:
    room.publish(tokens, {IndexSpace.FULL: room.next_table(np.arange(2, dtype=np.int32))}, metadata)


def tell(rooms: Rooms, attachment: Attachment, kind: str, **more: Any) -> None:
    attachment.due = [RoomEvent(room=1, generation=1, kind=kind, **more)]  # type: ignore[arg-type]
    rooms.look()


def test_a_prompt_is_held_published_and_finished(rooms: Rooms, attachment: Attachment) -> None:
    room = sent(rooms)
    assert room.state is Poll.WAITING
    publish(room, 32)
    assert room.state is Poll.TRANSFERRING
    publish(room, 8, b"token")
    assert [kind for kind, _ in attachment.said] == ["Hold", "Publish", "Publish", "Finish"]
    tell(rooms, attachment, "completed")
    assert room.state is Poll.SUCCESS


def test_orders_wait_for_a_node(rooms: Rooms, attachment: Attachment) -> None:
    attachment.node = ""
    room = sent(rooms)
    publish(room, 40, b"")
    assert (room.state, attachment.said) == (Poll.TRANSFERRING, [])
    attachment.node = "b"
    rooms.look()
    assert [kind for kind, _ in attachment.said] == ["Hold", "Publish", "Finish"]


def test_pages_of_a_room_that_was_given_up_are_not_named_again_before_it_is_over(
    rooms: Rooms, attachment: Attachment
) -> None:
    first = sent(rooms, 1)
    publish(first, 32)
    rooms.give_up(first, "aborted")
    rooms.forget(first)
    second = sent(rooms, 2)
    publish(second, 40, b"")
    assert [kind for kind, room in attachment.said if room == 2] == ["Hold"]
    tell(rooms, attachment, "aborted")
    assert [kind for kind, room in attachment.said if room == 2] == ["Hold", "Publish", "Finish"]


@pytest.mark.parametrize("make", [sent, fetched])
def test_a_room_of_another_request_is_refused(rooms: Rooms, make: Any) -> None:
    first, second = make(rooms), make(rooms)
    assert second.state is Poll.FAILED
    assert "bootstrap_room" in second.reason
    assert not first.is_over
    rooms.forget(second)
    rooms.forget(first)
    assert not make(rooms).is_over


@pytest.mark.parametrize("make", [sent, fetched])
@pytest.mark.parametrize("kind", ["failed", "aborted", "refused"])
def test_a_room_that_fails_says_why(rooms: Rooms, attachment: Attachment, make: Any, kind: str) -> None:
    room = make(rooms)
    tell(rooms, attachment, kind, code="deadline", reason="nobody came")
    assert room.state is Poll.FAILED
    assert "nobody came" in room.reason


@pytest.mark.parametrize("make", [sent, fetched])
def test_rooms_end_with_their_node(rooms: Rooms, attachment: Attachment, make: Any) -> None:
    room = make(rooms)
    attachment.node = "b"
    rooms.look()
    assert room.state is Poll.FAILED
    assert "ended" in room.reason


def test_decode_takes_the_metadata_of_a_committed_room(rooms: Rooms, attachment: Attachment) -> None:
    room, taken = fetched(rooms), []
    room.accept = taken.append
    room.provide({}, 0)
    assert room.state is Poll.TRANSFERRING
    tell(rooms, attachment, "committed", metadata={"pp0.tp0": b"row"})
    assert (room.state, taken[0].metadata) == (Poll.SUCCESS, {"pp0.tp0": b"row"})


def test_metadata_that_does_not_fit_fails_the_room(rooms: Rooms, attachment: Attachment) -> None:
    room = fetched(rooms)

    def refuse(_: RoomEvent) -> None:
        raise UnsupportedError("other fields")

    room.accept = refuse
    tell(rooms, attachment, "committed")
    assert (room.state, room.reason) == (Poll.FAILED, "other fields")


def test_other_ranks_give_no_orders_and_hold_nobody_up(attachment: Attachment) -> None:
    rooms = Rooms(attachment, leads=False)  # type: ignore[arg-type]
    room, taken = fetched(rooms), []
    room.accept = taken.append
    room.provide({}, 0)
    assert (room.poll, attachment.said) == (Poll.SUCCESS, [])
    rooms._next_look_s = 0.0
    tell(rooms, attachment, "committed", metadata={"pp0.tp0": b"row"})
    assert (room.poll, len(taken)) == (Poll.SUCCESS, 1)


def test_another_rank_says_that_a_room_has_failed(attachment: Attachment) -> None:
    rooms = Rooms(attachment, leads=False)  # type: ignore[arg-type]
    room = fetched(rooms)
    tell(rooms, attachment, "failed", code="deadline", reason="nobody came")
    assert room.poll == Poll.FAILED


def test_the_rooms_of_sglang_become_ours() -> None:
    found = {room_of(room, attempt) for room in (1, 2, 2**53, 2**62, 2**63 - 1, 2**70, -1) for attempt in (1, 2)}
    assert len(found) == 14
    assert max(found) <= MAX_ROOM


def request(**more: Any) -> SimpleNamespace:
    common = {"origin_input_ids": [5, 6, 7], "output_ids": [], "lora_id": None, "extra_key": None}
    return SimpleNamespace(**common, sampling_params=SimpleNamespace(custom_params=None), **more)


def test_a_prompt_that_is_computed_again_is_the_same_on_both_sides() -> None:
    """Decode counts its retractions and has told prefill of them; prefill gets the tokens of the answer as a part of the prompt."""
    first = prompt_of(request(retraction_count=1), 9)
    retracted = request(retraction_count=2, pd_rebootstrap_in_progress=True)
    retracted.output_ids = [8, 9]
    again = request(retraction_count=0)
    again.origin_input_ids, again.sampling_params.custom_params = [5, 6, 7, 8, 9], {ATTEMPT: 3}
    assert prompt_of(retracted, 9) == prompt_of(again, 9) == Prompt(5, prompt_of(again, 9).digest, 3)
    assert (first.attempt, prompt_of(again, 10).digest == prompt_of(again, 9).digest) == (1, False)


def test_a_retracted_request_with_images_is_not_computed_without_them() -> None:
    assert prompt_of(request(multimodal_inputs=object()), 9).attempt == 1
    with pytest.raises(UnsupportedError, match="images"):
        prompt_of(request(multimodal_inputs=object(), pd_rebootstrap_in_progress=True, retraction_count=1), 9)


@pytest.mark.parametrize("told", ["2", 2.0, True, None, [2]])
def test_a_client_that_names_no_attempt_has_the_first_one(told: Any) -> None:
    asked = request()
    asked.sampling_params.custom_params = {ATTEMPT: told}
    assert prompt_of(asked, 9).attempt == 1


def test_a_room_is_stopped_by_another_thread_at_the_next_look(rooms: Rooms, attachment: Attachment) -> None:
    known, unknown = fetched(rooms), FetchedRoom(2, Prompt(40, b"d"), rooms)
    known.provide({}, 0)
    for room in (known, unknown):
        rooms.stop_soon(room, "prefill is away")
    assert (known.state, unknown.state) == (Poll.TRANSFERRING, Poll.BOOTSTRAPPING)
    rooms.look()
    assert (known.state, attachment.said[-1]) == (Poll.TRANSFERRING, ("AbortRoom", 1))
    assert (unknown.state, unknown.reason) == (Poll.FAILED, "prefill is away")
    tell(rooms, attachment, "aborted", reason="by the decode engine: prefill is away")
    assert "prefill is away" in known.reason


@pytest.mark.parametrize("make", [sent, fetched])
def test_rooms_of_released_memory_are_forgotten_and_later_ones_wait(
    rooms: Rooms, attachment: Attachment, make: Any
) -> None:
    room = make(rooms)
    rooms.give_up_all("memory is released")
    assert (room.state, room.reason, attachment.node) == (Poll.FAILED, "memory is released", "")
    following, before = make(rooms), len(attachment.said)
    attachment.node = "a"
    rooms.look()
    assert (following.state, len(attachment.said)) == (Poll.WAITING, before + 1)


@pytest.fixture
def rows() -> tuple[MetadataRows, list[np.ndarray]]:
    fields = [np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(6, dtype=np.uint64).reshape(3, 2)]
    return MetadataRows([one.ctypes.data for one in fields], [one[0].nbytes for one in fields]), fields


def test_a_row_arrives_in_another_row(rows: tuple[MetadataRows, list[np.ndarray]]) -> None:
    row, fields = rows
    before = [one[1].copy() for one in fields]
    row.write(2, row.read(1))
    assert all((one[2] == was).all() for one, was in zip(fields, before, strict=True))


def test_a_row_of_other_fields_is_refused(rows: tuple[MetadataRows, list[np.ndarray]]) -> None:
    row, fields = rows
    other = MetadataRows(row.addresses[:1], row.row_bytes[:1])
    with pytest.raises(UnsupportedError, match="same model"):
        row.write(0, other.read(0))
    assert (fields[0][0] == np.arange(4)).all()


@pytest.mark.parametrize(
    ("context_tokens", "page_tokens", "page_count", "wanted"),
    [
        (MOST_PAGES, 1, 2 * MOST_PAGES, ""),
        (10 * MOST_PAGES, 1, MOST_PAGES, ""),
        (MOST_PAGES + 1, 1, 2 * MOST_PAGES, "--page-size to 2 or more"),
        (16 * MOST_PAGES, 16, 2 * MOST_PAGES, ""),
        (33 * MOST_PAGES, 16, 3 * MOST_PAGES, "--page-size to 33 or more"),
    ],
)
def test_a_server_whose_prompts_have_too_many_pages_does_not_start(
    context_tokens: int, page_tokens: int, page_count: int, wanted: str
) -> None:
    buffer = Buffer(kind=ComponentKind.MHA_KV, layer=0, address=0, page_bytes=64, page_count=page_count)
    pools = RankPools(page_tokens=page_tokens, buffers=(buffer,), device="cpu")
    with pytest.raises(UnsupportedError, match=wanted) if wanted else nullcontext():
        require_nameable(pools, context_tokens)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, ""),
        ({"_unified_kv": True}, "another layout than paged fp8"),
        ({"compression_ratios": [4, 2]}, "another layout than paged fp8"),
        ({"swa_kv_pool": None}, "another layout than paged fp8"),
        ({"swa_req_ring_size": 256}, "keeps windows by request"),
        ({"swa_kv_pool": SimpleNamespace(page_size=64)}, "SGLANG_OPT_SM120_DIRECT_SWA_KV=0"),
        ({"compress_state_pools": [None, SimpleNamespace(online=True)]}, "SGLANG_OPT_USE_ONLINE_COMPRESS=0"),
    ],
)
def test_forms_of_deepseek_v4_that_are_not_served_are_refused_by_name(form: dict[str, Any], words: str) -> None:
    """Window pages in four parts have as many bytes as one page: sizes alone would not tell."""
    served = {"_unified_kv": False, "compression_ratios": [0, 4, 128], "swa_page_size": 256, "compress_state_pools": []}
    pool = SimpleNamespace(**served | {"swa_kv_pool": SimpleNamespace(page_size=256)} | form)
    with pytest.raises(UnsupportedError, match=words) if words else nullcontext():
        require_paged_v4(pool)


def test_a_space_has_the_pages_that_all_of_its_buffers_have() -> None:
    pages = {"page_bytes": 64, "kind": ComponentKind.MHA_KV}
    buffers = tuple(Buffer(layer=at, address=4096 * at, page_count=9 - at, **pages) for at in range(2))
    pools = RankPools(page_tokens=4, buffers=buffers, device="cuda:1")
    rank = Rank(pp=0, tp=0)
    cache = instance_geometry({rank: pools}, name="m", tp_size=1, facts={})
    regions = rank_regions(cache.geometry, pools, rank)
    assert [(one.page_count, one.pages_per_extent, one.device) for one in regions] == [(8, 8, 1)] * 2


def test_an_enum_grows_in_place() -> None:
    class Backend(Enum):
        FIRST = "first"

    ours = add_member(Backend, "OURS", "ours")
    assert add_member(Backend, "OURS", "ours") is ours is Backend("ours") is Backend["OURS"]
    assert [one.value for one in Backend] == ["first", "ours"]
    assert ours.name == "OURS"


def test_a_refused_hold_holds_nobody_up(rooms: Rooms, attachment: Attachment) -> None:
    """The node knows nothing of the room, so no last event ever comes."""
    refused = sent(rooms, 1)
    tell(rooms, attachment, "refused", code="not_ready", reason="a rank worker starts")
    assert refused.state is Poll.FAILED
    assert [kind for kind, _ in attachment.said] == ["Hold"]
    publish(second := sent(rooms, 2), 40, b"")
    assert [kind for kind, room in attachment.said if room == second.id] == ["Hold", "Publish", "Finish"]


def test_pages_that_the_gpu_still_writes_wait_and_hold_back_later_ones(rooms: Rooms, attachment: Attachment) -> None:
    room, passed = sent(rooms), [False]
    room.publish(32, {}, is_final=lambda: passed[0])
    publish(room, 8, b"")
    assert [kind for kind, _ in attachment.said] == ["Hold"]
    passed[0], rooms._next_look_s = True, 0.0
    rooms.look()
    assert [kind for kind, _ in attachment.said] == ["Hold", "Publish", "Publish", "Finish"]


def test_a_node_that_is_gone_reads_no_pages_of_a_room_that_was_given_up(rooms: Rooms, attachment: Attachment) -> None:
    publish(first := sent(rooms, 1), 32)
    rooms.give_up(first, "aborted")
    attachment.node = ""
    rooms.look()
    attachment.node = "a"
    publish(sent(rooms, 2), 40, b"")
    rooms.look()
    assert [kind for kind, room in attachment.said if room == 2][-2:] == ["Publish", "Finish"]


class Ranks:
    """Two ranks of a decode server and their node, with what SGLang does in each turn to a request that has pages."""

    def __init__(self, *, holds_back: bool) -> None:
        self.attached = [Attachment(), Attachment()]
        self.ranks = [
            Rooms(one, leads=not number, holds_back=holds_back)  # type: ignore[arg-type]
            for number, one in enumerate(self.attached)
        ]
        self.rooms = [fetched(one) for one in self.ranks]
        self.rows = [0, 0]
        for number, room in enumerate(self.rooms):
            room.accept = lambda _, number=number: self.rows.__setitem__(number, 1)  # type: ignore[misc]
            room.provide({}, 0)
        self.writing = {0, 1}
        """The ranks for which transports may write."""
        self.answer = ""
        self.held = False
        self.freed = False

    def act(self, what: str, rank: int, ends: str) -> None:
        one = self.attached[rank]
        match what:
            case "event" if one.node == "a":
                one.due = [RoomEvent(room=1, generation=1, kind=ends)]  # type: ignore[arg-type]
            case "noticed":
                one.node = ""
            case "closed":
                self.writing -= {rank}
            case "attached":
                one.node = "b"
        self.turn()

    def turn(self) -> None:
        for one in self.ranks:
            one._next_look_s = 0.0
            one.look()
        if not self.answer:
            gates = [Poll.SUCCESS if row else Poll.TRANSFERRING for row in self.rows]
            lowest = min(
                min(room.poll, gate) if room.poll == Poll.SUCCESS else room.poll
                for room, gate in zip(self.rooms, gates, strict=True)
            )
            if lowest == Poll.FAILED:
                for one, room in zip(self.ranks, self.rooms, strict=True):
                    one.give_up(room, "another rank")
                self.held = self.ranks[0].holds_back and any(room.may_be_written for room in self.rooms)
            self.answer = {Poll.FAILED: "error", Poll.SUCCESS: "tokens"}.get(Poll(lowest), "")
            self.freed = bool(self.answer) and not self.held
        elif self.held and not self.rooms[0].may_be_written:
            self.freed = True


def orders(happens: dict[tuple[str, int], set[tuple[str, int]]]) -> Iterator[list[tuple[str, int]]]:
    """Yield every order of what happens. `happens`: what comes before each."""
    if not happens:
        yield []
    for first in [one for one, before in happens.items() if not before & happens.keys()]:
        for rest in orders({one: before for one, before in happens.items() if one != first}):
            yield [first, *rest]


KILLED = {
    ("noticed", 0): set(),
    ("noticed", 1): set(),
    ("closed", 0): set(),
    ("closed", 1): set(),
    ("attached", 0): {("noticed", 0), ("closed", 0), ("closed", 1)},
    ("attached", 1): {("noticed", 1), ("closed", 0), ("closed", 1)},
}


@pytest.mark.parametrize("holds_back", [True, False])
@pytest.mark.parametrize("heard", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("ends", ["committed", "failed"])
def test_no_rank_is_written_to_when_sglang_frees_the_pages(
    heard: tuple[int, ...], ends: str, holds_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is killed, before or after some ranks have heard how the room ended, and the ranks notice in any order."""
    monkeypatch.setattr("kvbridge.engine.sglang.rooms.LOOK_S", 0.0)
    happens = KILLED | {("event", rank): set() for rank in heard}
    for order in orders(happens):
        if any(order.index(("event", rank)) > order.index(("noticed", rank)) for rank in heard):
            continue
        ranks = Ranks(holds_back=holds_back)
        if heard:  # the node has proved that nobody writes
            ranks.writing = set()
        for what, rank in order:
            ranks.act(what, rank, ends)
            assert not (ranks.freed and ranks.writing), order
        ranks.turn()
        assert ranks.answer == ("tokens" if ends == "committed" and ranks.rows == [1, 1] else "error"), order
        assert ranks.freed, order


# ---------------------------------------------------------------------------------------------- SGLang's classes


SGLANG = {
    "disaggregation.base.conn": "KVArgs KVTransferMetric "
    "BaseKVBootstrapServer BaseKVManager BaseKVReceiver BaseKVSender",
    "disaggregation.utils": "DisaggregationMode",
    "runtime_context": "get_parallel",
    "server_args": "ServerArgs",
}
ANY = type("Any", (), {})


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module that SGLang loads, without SGLang."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    sys.modules["sglang"].__version__ = "0"  # type: ignore[attr-defined]
    for name, members in SGLANG.items():
        module = ModuleType(name)
        vars(module).update({member: type(member, (ANY,), {}) for member in members.split()})
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", module)
    name = "kvbridge.engine.sglang.backend"
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.fixture
def manager(backend: ModuleType, rooms: Rooms) -> Iterator[Any]:
    made = object.__new__(backend.KvbridgeManager)
    made.rooms, made.guard, made.page_tokens = rooms, Guard(lambda _code: None), 16
    made.prefill_info_table = {"host:1": SimpleNamespace(dp_size=2, nodes=dict.fromkeys((0, 1), NODE[0]))}
    made.kv_args, made.instance = SimpleNamespace(state_types=()), SimpleNamespace(dp_size=1)
    token = SHOWN.set((None, request()))
    yield made
    SHOWN.reset(token)


@pytest.mark.parametrize("room", [None, 0, -1, 2**70])
@pytest.mark.parametrize("side", ["KvbridgeSender", "KvbridgeReceiver"])
def test_whatever_room_a_client_names_the_scheduler_goes_on(
    manager: Any, backend: ModuleType, side: str, room: Any
) -> None:
    made = getattr(backend, side)(manager, "host:1", room)
    assert (made.poll() == Poll.FAILED) == (not room)


@pytest.mark.parametrize(("tokens", "pages", "first"), [(40, 2, 1), (32, 2, 0), (33, 1, 2), (16, 1, 0)])
def test_the_last_pages_end_with_the_prompt(
    manager: Any, backend: ModuleType, tokens: int, pages: int, first: int
) -> None:
    manager.kv_args.state_types = [SimpleNamespace(value="swa")]
    table = backend._state_tables(manager, [np.arange(pages, dtype=np.int64)], tokens)[IndexSpace.SWA]
    assert (table.first_page, table.ids.dtype) == (first, np.int32)


@pytest.mark.parametrize("ids", [[2**70], None])
def test_a_request_that_cannot_be_read_ends_alone(manager: Any, backend: ModuleType, ids: Any) -> None:
    SHOWN.get()[1].origin_input_ids = ids
    for side in (backend.KvbridgeSender, backend.KvbridgeReceiver):
        made = side(manager, "host:1", 1)
        assert made.poll() == Poll.FAILED
        with pytest.raises(PeerError, match="Error"):
            made.failure_exception()
        made.clear()


def test_a_defect_while_a_request_is_served_ends_that_request(
    manager: Any, backend: ModuleType, attachment: Attachment
) -> None:
    sender = backend.KvbridgeSender(manager, "host:1", 1)
    sender.send(np.arange(2, dtype=np.int32), state_indices=None, num_kv_tokens="?")
    assert sender.poll() == Poll.FAILED
    receiver = backend.KvbridgeReceiver(manager, "host:1", 2)
    receiver.init(0)
    receiver.send_metadata("?")
    assert receiver.poll() == Poll.FAILED
    assert [kind for kind, _ in attachment.said] == ["Hold", "AbortRoom", "Fetch", "AbortRoom"]


@pytest.mark.parametrize(("follows_room", "is_routed"), [(True, False), (True, True), (False, False)])
def test_decode_finds_the_group_that_computes_a_room(
    manager: Any, backend: ModuleType, follows_room: bool, is_routed: bool
) -> None:
    told: list[int] = []
    manager.instance = SimpleNamespace(dp_size=2, dp_rank=0, follows_room=follows_room, runs_node=True)
    manager._announcement = SimpleNamespace(computes=told.append)
    ours, other = (backend.KvbridgeSender(manager, "host:1", room, is_routed) for room in (4, 7))
    assert (ours.poll(), other.poll() == Poll.FAILED) == (Poll.WAITING, follows_room and not is_routed)
    assert told == ([] if follows_room else [4, 7])
    if other.poll() == Poll.FAILED:
        with pytest.raises(PeerError, match="group 0 has got it, and decode will ask group 1"):
            other.failure_exception()


def test_the_pages_of_a_failed_request_are_kept_until_all_ranks_serve_the_next_node(
    manager: Any, backend: ModuleType, rooms: Rooms, attachment: Attachment
) -> None:
    rooms.holds_back, manager.held = True, {}
    receiver = backend.KvbridgeReceiver(manager, "host:1", 7)
    receiver.init(0)
    receiver.send_metadata(np.arange(3, dtype=np.int32), 0)
    attachment.node = ""
    assert receiver.poll() == Poll.FAILED
    receiver.ensure_abort_notified(force_arm=True)
    assert (receiver.abort_notified, manager.is_abort_release_safe(7, 0)) == (True, False)
    attachment.node = "b"
    assert manager.is_abort_release_safe(7, 0)
    manager.clear_deferred_abort_state(7)
    assert not manager.held


def test_a_room_that_another_rank_has_failed_is_given_up(
    manager: Any, backend: ModuleType, attachment: Attachment
) -> None:
    for side in (backend.KvbridgeSender, backend.KvbridgeReceiver):
        made = side(manager, "host:1", 9)
        if side is backend.KvbridgeReceiver:
            made.init(0)
        with pytest.raises(PeerError, match="another rank"):
            made.failure_exception()
        assert attachment.said[-1][0] == "AbortRoom"


def test_a_defect_in_a_look_at_the_node_ends_nothing(manager: Any, backend: ModuleType, attachment: Attachment) -> None:
    sender = backend.KvbridgeSender(manager, "host:1", 1)
    attachment.due = [None]  # type: ignore[list-item]
    assert sender.poll() == Poll.WAITING


def test_a_request_that_decode_has_retracted_is_asked_for_again(
    manager: Any, backend: ModuleType, attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill hears of the attempt. Decode hears why prefill does not compute."""
    asked: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(backend, "generate", lambda *given: asked.put(given) or "it is away")
    SHOWN.set((None, request(retraction_count=1, pd_rebootstrap_in_progress=True)))
    receiver = backend.KvbridgeReceiver(manager, "host:1", 1)
    receiver.init(1)
    manager.submit_prefill_recompute(receiver, {"sampling_params": {}})
    address, server, payload = asked.get(timeout=10)
    assert (address, server) == ("host:1", manager.prefill_info_table["host:1"])
    assert payload == {
        "sampling_params": {"custom_params": {ATTEMPT: 2}},
        **dict.fromkeys(("routed_dp_rank", "disagg_prefill_dp_rank"), 1),
    }
    eventually("it is given up", lambda: receiver.poll() is None or attachment.said[-1][0] == "AbortRoom")
    assert attachment.said == [("Fetch", room_of(1, 2)), ("AbortRoom", room_of(1, 2))]


def test_memory_is_given_back_only_when_nothing_reaches_it(manager: Any) -> None:
    """SGLang sleeps: what is written to the pools afterwards would be in nobody's memory, or in somebody else's."""
    stuck = SimpleNamespace(close=lambda: (_ for _ in ()).throw(UnclosedError("nixl hangs")))
    manager._worker, manager._serve = stuck, lambda: "another"
    with pytest.raises(UnclosedError):
        manager.deregister_buffer_to_engine()
    assert manager._worker is stuck
    manager.register_buffer_to_engine()
    assert manager._worker == "another"


def served(*, role: Role = Role.PREFILL, arguments: Mapping[str, Any] = MappingProxyType({}), **parallel: Any) -> Any:
    """Return an instance of SGLang, of its scheduler with these ranks and sizes."""
    said = {
        "host": "0.0.0.0",
        "port": 1,
        "disaggregation_bootstrap_port": 2,
        "load_balance_method": "follow_bootstrap_room",
    }
    said |= {
        "enable_dp_attention": False,
        "nnodes": 1,
        "model_path": "m",
        "revision": None,
        "quantization": None,
        "dtype": "auto",
    }
    one = {
        "pp_rank": 0,
        "pp_size": 1,
        "attn_tp_rank": 0,
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_rank": None,
        "dp_size": 1,
    }
    told = SimpleNamespace(**said | {"attention_backend": None} | dict(arguments))
    return read_instance(role, told, SimpleNamespace(**one | parallel), version="0")


def test_each_group_of_dp_attention_has_a_node_of_its_own() -> None:
    groups = [served(dp_rank=rank, num_dp_ranks=2) for rank in range(2)]
    assert [(one.dp_rank, one.dp_size, one.runs_node) for one in groups] == [(0, 2, True), (1, 2, True)]
    assert len({one.place.runtime_dir for one in groups}) == 2


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"role": Role.DECODE, "pp_size": 2}, "--pp-size"),
        ({"arguments": {"enable_dp_attention": True}}, "--enable-dp-attention"),
        ({"attn_cp_size": 2}, "--attention-context-parallel-size"),
        ({"arguments": {"disaggregation_decode_host_receive_threshold": 0.5}}, "host-receive-threshold"),
        ({"arguments": {"nnodes": 2}}, "--nnodes"),
    ],
)
def test_what_is_not_served_is_refused_with_its_flag(told: dict[str, Any], flag: str) -> None:
    with pytest.raises(UnsupportedError, match=flag):
        served(**told)
