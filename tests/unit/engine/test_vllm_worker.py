"""The connector in a worker's process of vLLM: what becomes of its tensors when a rank worker does not end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbridge.core.errors import BridgeError, DeadlineError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.transfers import ServedRole
from kvbridge.engine.vllm import processes
from kvbridge.engine.vllm.processes import Worker
from kvbridge.worker.lifecycle import UnclosedError

R0 = Rank(pp=0, tp=0)


class RankWorker:
    """A rank worker that ends as a test says."""

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
