"""No error leaves a hook of vLLM: the hook's answer instead, the log, and the end of the request."""

import inspect
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import Role
from kvbridge.core.process import Clock
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.engine.kit import LINES, Guard
from tests.helpers.hooked_vllm import SlidingWindowSpec, Vllm, connector_module, request
from tests.helpers.rooms import ADDRESS, PAGE

BLOCKS = [4, 5]
AT_START_AND_END = {
    "register_kv_caches",
    "restore_kv_caches",
    "set_xfer_handshake_metadata_pp_aware",
    "shutdown",
    "unregister_kv_caches",
}
"""Hooks that raise: for the person who starts vLLM, or because bytes may still be moved."""
SAY_NOTHING_NEW = {
    "bind_gpu_block_pool",
    "get_handshake_metadata",
    "get_loaded_kv_cache_group_ids",
    "save_kv_layer",
    "wait_for_layer_load",
    "wait_for_save",
}
"""Hooks that do nothing, or hand one thing over."""
FOR_A_PLACE = {"room": "42", "prefill": [{"endpoint": ADDRESS.endpoint}], "prompt_tokens": 512}
TO_DECODE = {"do_remote_prefill": True, "kvbridge": FOR_A_PLACE}


@pytest.fixture(scope="module")
def connector() -> Iterator[ModuleType]:
    with connector_module() as module:
        yield module


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"'{name}' is broken")


OUTPUT = SimpleNamespace(
    preempted_req_ids=set(),
    kv_connector_block_state=None,
    finished_recving={"r"},
    finished_sending=None,
    kv_connector_worker_meta=None,
)
CALLS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "has_pending_block_frees": ((), False),
    "has_pending_push_work": ((), False),
    "on_new_request": ((request("r", TO_DECODE),), None),
    "get_num_new_matched_tokens": ((request("r", TO_DECODE), 0), (0, False)),
    "update_state_after_alloc": ((request("r", TO_DECODE), None, 512), None),
    "request_finished_all_groups": ((request("r", TO_DECODE), ([],)), (False, None)),
    "build_connector_meta": ((OUTPUT,), {}),
    "update_connector_output": ((OUTPUT,), None),
    "get_kv_connector_stats": ((), None),
    "start_load_kv": ((None,), None),
    "get_transfer_results": ((set(),), (None, None)),
    "build_connector_worker_meta": ((), None),
}
OF_THE_WORKER = {"start_load_kv", "get_transfer_results", "build_connector_worker_meta"}


def plain(answer: Any) -> Any:
    for fields in (("steps",), ("finished_sending", "finished_recving")):
        if all(hasattr(answer, field) for field in fields):
            found = tuple(getattr(answer, field) for field in fields)
            return found if len(found) > 1 else found[0]
    return answer


@pytest.mark.parametrize("hook", CALLS)
def test_a_hook_that_fails_answers_what_moves_nothing_and_says_where_it_failed(hook, connector):
    vllm = Vllm(connector, Role.DECODE)
    ours = vllm.worker if hook in OF_THE_WORKER else vllm.scheduler
    ours._requests["r"] = Broken()
    ours._scheduler = ours._worker = ours._connector_metadata = ours._stats = Broken()
    given, answer = CALLS[hook]
    counted: list[str] = []
    ours.guard._count = counted.append
    with capture_logs() as lines:
        assert plain(getattr(ours, hook)(*given)) == answer
    assert counted[:1] == ["internal"]
    assert lines[0]["event"] == "hook_failed"
    assert lines[0]["reason"].endswith("please report it")
    assert lines[0]["exc_info"].__traceback__ is not None


def test_every_hook_is_guarded_or_is_known_not_to_be(connector: ModuleType) -> None:
    hooks = {
        name: method
        for name, method in vars(connector.KvbridgeConnector).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    guarded = {name for name, method in hooks.items() if hasattr(method, "__wrapped__")}
    assert guarded == set(CALLS)
    assert hooks.keys() - guarded == AT_START_AND_END | SAY_NOTHING_NEW


def test_a_load_whose_hook_fails_once_it_has_begun_is_given_up_and_reported(connector: ModuleType) -> None:
    vllm = Vllm(connector, Role.DECODE)
    asked = request("r", TO_DECODE)

    def fail(*_: object) -> str:
        raise RuntimeError("a defect")

    vllm.rooms._provide = fail
    vllm.arrives(asked, BLOCKS)
    assert list(vllm.waiting) == ["r"]
    vllm.steps()
    assert not vllm.waiting
    assert vllm.failed == {"r"}
    assert vllm.failures == {"internal": 1, "aborted": 1}
    vllm.ends(asked, BLOCKS)
    vllm.steps()
    assert vllm.rooms.idle


def test_a_request_whose_progress_cannot_be_read_keeps_no_other_one_from_its_step(connector: ModuleType) -> None:
    vllm = Vllm(connector, Role.PREFILL)
    vllm.rooms.pins = SimpleNamespace(pin=list, unpin=list)
    asked = [
        request(name, {"do_remote_decode": True, "kvbridge": {"room": room}}) for name, room in (("a", "1"), ("b", "2"))
    ]
    for one in asked:
        vllm.arrives(one, BLOCKS)
    read: list[str] = []

    def blocks_of(name: str) -> tuple[list[int], ...]:
        if name == "a":
            raise KeyError(name)
        read.append(name)
        return (BLOCKS,)

    output = SimpleNamespace(preempted_req_ids=set(), kv_connector_block_state=SimpleNamespace(get_block_ids=blocks_of))
    for _ in range(2):
        assert vllm.scheduler.build_connector_meta(output).steps
    assert read == ["b", "b"]
    assert vllm.rooms.computing == ("b",)
    assert vllm.scheduler._stats.take()["failures"] == {"internal": 1, "aborted": 1}


def test_what_the_node_can_never_be_told_is_not_tried_at_each_step(connector: ModuleType) -> None:
    """A withdrawal, and the end of a room."""
    vllm = Vllm(connector, Role.DECODE)
    vllm.rooms._withdraw(7, {"prefill": (), "prompt_tokens": 0})
    vllm.rooms._give_up(8, b"\xff")
    vllm.steps(2)
    assert vllm.rooms.idle
    assert not vllm.rooms.attachment._unsent
    assert vllm.failures == {"invalid_input": 1}


def test_blocks_that_no_message_can_name_are_not_published_and_the_request_ends(connector, monkeypatch):
    """Blocks of a prompt that is longer than a table, for example. Otherwise they would be held for ever."""
    monkeypatch.setattr("kvbridge.engine.kit.attachment.to_wire", lambda _: 1 / 0)
    vllm = Vllm(connector, Role.PREFILL)
    many = [4] * 20
    asked = request("r", {"do_remote_decode": True, "kvbridge": {"room": "1"}}, tokens=len(many) * PAGE)
    vllm.arrives(asked, many)
    vllm.ends(asked, many)
    vllm.steps()
    assert not vllm.waiting
    assert vllm.rooms.idle
    assert not [room for room in vllm.node.bench.service.book if not room.is_over]


TO_HOLD = {"do_remote_decode": True}
WINDOW = SlidingWindowSpec(PAGE, 3 * PAGE)


@pytest.mark.parametrize(
    ("role", "specs", "params", "more", "left"),
    [
        (Role.PREFILL, [WINDOW], TO_HOLD, {}, 1),
        (Role.PREFILL, [], TO_HOLD, {}, 0),
        (Role.PREFILL, [WINDOW], {"any": "thing"}, {}, 0),
        (Role.DECODE, [WINDOW], TO_HOLD, {}, 0),
        (Role.DECODE, [WINDOW], TO_DECODE, {}, 0),
        (Role.PREFILL, [WINDOW], TO_HOLD, {"skip_reading_prefix_cache": True}, None),
        (Role.PREFILL, [], TO_HOLD, {"skip_reading_prefix_cache": True}, 0),
        (Role.PREFILL, [WINDOW], TO_HOLD, {"tokens": 1}, None),
        (Role.DECODE, [WINDOW], TO_DECODE, {"tokens": 1}, None),
    ],
)
def test_prefill_leaves_the_last_token_out_where_decode_needs_what_is_before_it(
    connector: ModuleType, role: Role, specs: list[Any], params: Any, more: dict[str, Any], left: int | None
) -> None:
    vllm, tokens = Vllm(connector, role, *specs), more.pop("tokens", 2 * PAGE)
    asked = request("r", params, tokens=tokens)
    vars(asked).update(more)
    of_others = asked.prompt_token_ids
    vllm.scheduler.on_new_request(asked)
    rest = tokens - (left or 0)
    assert (asked.num_prompt_tokens, len(asked._all_token_ids), len(asked.prompt_token_ids)) == (rest,) * 3
    assert asked.max_tokens == (1 if left else 16)
    assert len(of_others) == tokens, "requests of one prompt share its list"
    assert ("r" in vllm.scheduler._requests) == (left is not None)
    matched = vllm.scheduler.get_num_new_matched_tokens(asked, 0)[0]
    assert matched == (tokens - 1 if role is Role.DECODE and params is TO_DECODE and left is not None else 0)


@pytest.fixture
def clock() -> Any:
    now = [0.0]

    class Clocked:
        read: Clock = staticmethod(lambda: now[0])

        @staticmethod
        def advance(seconds: float) -> None:
            now[0] += seconds

    return Clocked


def test_errors_are_counted_all_and_told_a_few_a_second(clock: Any) -> None:
    counted: list[str] = []
    guard = Guard(counted.append, clock=clock.read)

    def fail(error: Exception) -> None:
        with guard.over("computed_here", "r"):
            raise error

    with capture_logs() as lines:
        for _ in range(20):
            fail(InvalidInputError("x" * 10_000))
        fail(KeyError("k"))
        clock.advance(2)
        guard.look()
        fail(InvalidInputError("y"))
    assert counted == ["invalid_input"] * 20 + ["internal", "invalid_input"]
    assert [line["event"] for line in lines] == [
        *["hook_refused"] * LINES,
        "hook_failed",
        "lines_left_out",
        "hook_refused",
    ]
    assert len(lines[0]["reason"]) == REASON_CHARS
    assert (lines[LINES]["where"], lines[LINES]["code"]) == ("computed_here", "internal")
    assert "please report it" in lines[LINES]["reason"]
    assert lines[LINES + 1]["lines"] == 20 - LINES
