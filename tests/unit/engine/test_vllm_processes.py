"""The connector's processes: a worker whose rank worker does not end, and the thread that attaches to the node beside vLLM."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvbridge.core.errors import BridgeError, ConfigError, DeadlineError, NotReadyError, PeerError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import AbortRoom
from kvbridge.engine.kit import Guard, attachment
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.transfers import ServedRole
from kvbridge.engine.vllm import processes
from kvbridge.engine.vllm.processes import Worker
from kvbridge.worker.lifecycle import UnclosedError
from tests.helpers.hooked_vllm import Node

R0 = Rank(pp=0, tp=0)
LIMIT_S = 30.0


class RankWorker:
    node = "first"

    def __init__(self, error: BridgeError | None) -> None:
        self.error = error
        self.closed = 0

    def ends(self) -> list[object]:
        return []

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def staying(monkeypatch) -> list[object]:
    kept: list[object] = []
    monkeypatch.setattr(processes, "_STAYING", kept)
    return kept


def role_of(*workers: RankWorker) -> Worker:
    """Both roles on one set of tensors, each served by one of these."""
    role = Worker(SimpleNamespace(tp_size=1), R0, Guard(lambda _code: None))
    role._tensors = {"layer.0": torch.zeros(1)}
    for one, worker in zip((Role.PREFILL, Role.DECODE), workers, strict=True):
        role.roles.append(ServedRole(one, lambda worker=worker: worker))
    return role


@pytest.mark.parametrize("verb", ["unregister", "close"])
@pytest.mark.parametrize("error", [UnclosedError("nixl hangs"), DeadlineError("it did not end")])
@pytest.mark.parametrize("stuck", [0, 1])
def test_tensors_that_may_still_be_written_to_neither_sleep_nor_are_freed(staying, verb, error, stuck):
    """vLLM hears of it before it sleeps, and both roles let go as far as they can."""
    workers = [RankWorker(error if number == stuck else None) for number in range(2)]
    role = role_of(*workers)
    with pytest.raises(type(error)):
        getattr(role, verb)()
    assert [worker.closed for worker in workers] == [1, 1]
    assert staying == [role._tensors]
    with pytest.raises(type(error)):
        role.unregister()
    assert [worker.closed for worker in workers] == [2 if number == stuck else 1 for number in range(2)]


def test_a_worker_that_has_not_ended_is_not_followed_by_another_one(staying):
    stuck = RankWorker(UnclosedError("nixl hangs"))
    role = role_of(stuck, RankWorker(None))
    with pytest.raises(UnclosedError):
        role.unregister()
    role.restore()
    assert role.roles[0]._worker is stuck
    role.results()
    assert role.closed_here() == {}, "something of it may still move for the node"


def test_tensors_that_nobody_reaches_are_vllms_again(staying):
    workers = [RankWorker(None), RankWorker(None)]
    role = role_of(*workers)
    role.unregister()
    role.close()
    assert [worker.closed for worker in workers] == [1, 1]
    assert staying == []


class Attempts:
    """Attempts to attach, each with its error, in order; the last one succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)
        self.made = Node(Role.DECODE).attach()
        self.pauses: list[float] = []

    def adopt(self, *_: object, **__: object) -> Any:
        if self.left:
            raise self.left.pop(0)
        return self.made


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[NodeAttachment] = []
    wait_for = threading.Condition.wait_for

    def attach(*errors: Exception) -> Attempts:
        attempts = Attempts(*errors)
        monkeypatch.setitem(attachment.ENGINES, Role.DECODE, attempts)

        def counted(self: threading.Condition, predicate: Any, timeout: float | None = None) -> bool:
            if timeout in {attachment.PAUSE_S, attachment.LONG_PAUSE_S}:
                attempts.pauses.append(timeout)
                timeout = 0.0
            return wait_for(self, predicate, timeout)

        monkeypatch.setattr(threading.Condition, "wait_for", counted)
        opened.append(NodeAttachment(Role.DECODE, Path("/nowhere")))
        opened[-1].begin()
        opened[-1].wait(LIMIT_S)
        return attempts

    yield attach
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("errors", "said", "pause"),
    [
        ([ConfigError("it can be entered by others")] * 20 + [ConfigError("another")], ["config_invalid"] * 2, "LONG_PAUSE_S"),
        ([NotReadyError("it starts")] * 3, [], "PAUSE_S"),
        ([OSError("no descriptors are left")] * 2, ["internal"], "LONG_PAUSE_S"),
    ],
)  # fmt: skip
def test_what_somebody_has_to_change_is_said_once_and_asked_seldom_and_a_node_that_starts_up_often(
    attach: Any, errors: list[Exception], said: list[str], pause: str
) -> None:
    with capture_logs() as lines:
        attempts = attach(*errors)
    assert [(line["event"], line["code"]) for line in lines] == [("not_attached", code) for code in said]
    assert attempts.pauses == [getattr(attachment, pause)] * len(errors)
    assert not attempts.left


class LostOnce:
    """An engine whose connection ends with the first call, and the next one, which another attachment gets."""

    incarnation = "n"

    def say(self, *_: object, **__: object) -> None:
        raise PeerError("its connection has ended")

    def events(self) -> list[Any]:
        return []

    def close(self) -> None:
        """Nothing is open."""


def test_a_loss_between_two_looks_is_seen_by_the_next_look_though_the_node_is_attached_to_again(monkeypatch):
    """Events of the rooms may have come in between: the user must give its rooms up, as when the node has ended."""
    made = [LostOnce(), LostOnce()]
    monkeypatch.setitem(attachment.ENGINES, Role.DECODE, SimpleNamespace(adopt=lambda *_, **__: made.pop(0)))
    one = NodeAttachment(Role.DECODE, Path("/nowhere"))
    one.begin()
    try:
        one.wait(LIMIT_S)
        one.events()
        assert one.node == "n"
        assert not one.say(AbortRoom, 1, reason="r")
        one.wait(LIMIT_S)
        one.events()
        assert one.node == ""
        one.events()
        assert one.node == "n"
    finally:
        one.close()
