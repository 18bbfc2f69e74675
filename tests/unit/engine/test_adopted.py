"""The rank worker that lives on a thread of an engine's process: its end, and who is told of it."""

import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvbridge.core.errors import DeadlineError, InvalidInputError, NotReadyError, PeerError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.worker_messages import (
    NodeToWorker,
    Shutdown,
    WorkerClosed,
    WorkerFailed,
    WorkerHello,
    WorkerToNode,
)
from kvbridge.engine import DecodeEngine, memory
from kvbridge.engine.memory import AdoptedWorker, WorkerEnd, adopted_region
from kvbridge.worker import lifecycle as worker_life
from kvbridge.worker.lifecycle import NoNodeError, UnclosedError, serve_rank

RANK = Rank(pp=0, tp=0)


class NodeOf:
    """A node's end of a worker's link: it gives the answers that it was made with, and then falls silent."""

    daemon, daemon_ended = "first", False

    def __init__(self, *answers: NodeToWorker) -> None:
        self.answers, self.said = deque(answers), []

    def send(self, message: WorkerToNode) -> None:
        self.said.append(message)

    def receive(self, timeout_s: float) -> NodeToWorker | None:
        return self.answers.popleft() if self.answers else None

    def close(self) -> None:
        pass


def test_a_worker_that_does_not_end_in_time_is_not_taken_for_silent(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(memory, "open_node_link", lambda path: NodeOf())
    monkeypatch.setattr(memory, "serve_rank", lambda *args, **fields: go_on.wait(20))
    with pytest.raises(DeadlineError, match=r"rank worker of pp0.tp0 .* did not end within 0\.01 s; it may still read"):
        AdoptedWorker(Path("/nowhere"), RANK, ()).close(0.01)
    go_on.set()


@pytest.mark.parametrize(("answers", "left"), [(3, 1), (1, 0)])
def test_an_adopted_worker_says_that_it_has_closed_everything_and_waits_a_while_until_that_is_read(
    monkeypatch, answers, left
):
    monkeypatch.setattr(worker_life, "CLOSE_ANSWER_S", 5.0 if left else 0.01)
    node = NodeOf(*[Shutdown()] * answers)
    serve_rank(node, RANK, setup_timeout_s=1, adopted=(object(),))
    assert node.said[1:] == [WorkerClosed(rank=RANK)]
    assert len(node.answers) == left


def test_a_worker_that_the_node_has_not_welcomed_says_nothing_after_its_hello():
    """A node that starts takes its workers' hellos first, and would warn of anything else."""
    node = NodeOf()
    with pytest.raises(DeadlineError, match="worker_start_s"):
        serve_rank(node, RANK, setup_timeout_s=0.01)
    assert [type(one) for one in node.said] == [WorkerHello, WorkerFailed]


@pytest.mark.parametrize("closes", [True, False])
def test_only_a_worker_that_has_closed_its_transports_says_so(monkeypatch, closes):
    class Worker:
        def __init__(self, *args, **fields) -> None:
            self.closed = closes

        def run(self, stopped) -> None:
            raise PeerError("the transports" if not closes else "the node")

    monkeypatch.setattr(worker_life, "RankWorker", Worker)
    monkeypatch.setattr(
        worker_life, "_setup", lambda *args: type("Setup", (), {"transfer_timeout_s": 1.0, "transports": "{}"})
    )
    undone: list[str] = []
    monkeypatch.setattr(worker_life, "bring_memory", lambda *args, **_: args[3].callback(undone.append, "unmapped"))
    monkeypatch.setattr(worker_life, "_STAYING", staying := [])
    node = NodeOf(Shutdown())
    with pytest.raises(PeerError if closes else UnclosedError):
        serve_rank(node, RANK, setup_timeout_s=1, adopted=(object(),))
    assert (undone, len(staying)) == ((["unmapped"], 0) if closes else ([], 1)), "what may be reached stays mapped"
    assert [type(message) for message in node.said[1:]] == [WorkerFailed, *([WorkerClosed] if closes else [])]


def lives(monkeypatch, *endings: BaseException | None) -> AdoptedWorker:
    """A worker that ends like this, one life after another, and whose last life goes on until it is closed."""
    left = deque(endings)
    monkeypatch.setattr(memory, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(memory, "open_node_link", lambda path: NodeOf())

    def serve(*args, stopped, **fields) -> None:
        if not left:
            go_on = threading.Event()
            while not stopped():
                go_on.wait(0.001)
            return
        ending = left.popleft()
        if ending is not None:
            raise ending

    monkeypatch.setattr(memory, "serve_rank", serve)
    return AdoptedWorker(Path("/nowhere"), RANK, ())


def test_a_worker_that_has_ended_says_so_with_its_node_and_comes_back(monkeypatch):
    worker = lives(monkeypatch, PeerError("the node has gone"), NoNodeError("nobody there"), None, ValueError("?"))
    ends: list[WorkerEnd] = []
    deadline_s = time.monotonic() + 20
    while len(ends) < 3 and time.monotonic() < deadline_s:
        ends += worker.ends()
        time.sleep(0.001)
    told = [("the node has gone", "first", False), ("its node has ended it", "first", True), ("?", "first", False)]
    assert [(end.reason, end.node, end.node_gone) for end in ends] == told
    worker.close(20)
    assert (worker.ends(), worker.node) == ([], "")


def test_a_worker_that_has_not_closed_its_transports_never_says_that_it_has_ended_nor_comes_back(monkeypatch):
    worker = lives(monkeypatch, UnclosedError("nixl hangs"), PeerError("never raised"))
    worker._thread.join(20)
    assert not worker._thread.is_alive()
    assert worker.ends() == []
    for _ in range(2):
        with pytest.raises(UnclosedError, match=r"pp0\.tp0 .* not closed: nixl hangs; .* keep them where they are"):
            worker.close(20)


@pytest.mark.parametrize("error", [UnclosedError("nixl hangs"), DeadlineError("it did not end")])
def test_an_engine_whose_worker_is_not_closed_does_not_say_that_it_is_through(error):
    """A node that heard so would use the pages again while a transport may write to them."""
    closed: list[str] = []
    link, pools, order = (SimpleNamespace(close=partial(closed.append, name)) for name in ("link", "memory", "order"))
    pools.twins, order.devices = (), ()
    link.timeout_s, link.number, link.call = 1.0, lambda: 1, lambda *_: closed.append("detach")

    def close() -> None:
        raise error

    engine = DecodeEngine(link, None, pools, order, workers=[SimpleNamespace(close=close)])
    with pytest.raises(type(error)):
        engine.close()
    assert closed == ["order", "memory", "link"]


def test_nothing_has_begun_where_nobody_listens():
    class Nobody(NodeOf):
        def send(self, message: WorkerToNode) -> None:
            raise NotReadyError("no daemon answers there yet")

    with pytest.raises(NoNodeError):
        serve_rank(Nobody(), RANK, setup_timeout_s=1, adopted=(object(),))


def test_the_runtime_directory_may_be_relative_to_where_the_engine_runs(monkeypatch, tmp_path):
    """A socket's address must be absolute: with another one the worker would look for its node for ever."""
    asked: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "open_node_link", lambda path: asked.append(path) or NodeOf())
    monkeypatch.setattr(memory, "serve_rank", lambda *args, stopped, **fields: None)
    AdoptedWorker(Path("run"), RANK, ()).close(20)
    assert set(asked) <= {tmp_path / "run/worker.sock"}
    assert asked


@pytest.mark.parametrize(("kind", "space"), [("mha_kv", "full"), ("swa_kv", "swa"), ("c128_state", "request")])
def test_adopted_memory_is_described_without_a_geometry(kind, space):
    region = adopted_region(kind, 3, torch.zeros((4, 64), dtype=torch.uint8))
    assert (region.component, region.layer, region.space, region.page_count) == (kind, 3, space, 4)
    with pytest.raises(InvalidInputError, match=r"'kv' is no component; the kinds are .*mha_kv"):
        adopted_region("kv", 0, torch.zeros((4, 64), dtype=torch.uint8))
