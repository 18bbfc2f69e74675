"""The heartbeats of a daemon, against a directory that only writes down what it is told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvbridge.api.directory import Load, NodeRegistration
from kvbridge.core.errors import (
    BridgeError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    PeerError,
    StaleError,
    UnauthorizedError,
)
from kvbridge.core.ids import Role
from kvbridge.daemon.announce import Announcer
from tests.unit.bootstrap.fleet import node as fleet_node

WAIT_S = 20.0
AWAY = PeerError("away")


class FakeDirectory:
    base_url = "http://bootstrap.test"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problem: BridgeError | None = None
        self.hold: asyncio.Event | None = None
        self._changed = asyncio.Event()

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        self._changed.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.problem is not None:
            raise self.problem

    async def register(self, entry: NodeRegistration) -> None:
        await self._note("register")

    async def heartbeat(self, instance: str, node: str, beat: object) -> None:
        await self._note("heartbeat")

    async def deregister(self, instance: str, node: str, incarnation: str) -> None:
        await self._note("deregister")

    async def until(self, calls: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.calls) < calls:
                self._changed.clear()
                await self._changed.wait()


def announcer(*replicas, interval_s=60.0, load=Load, pause_s=0.001):
    entry = lambda: fleet_node("i", Role.PREFILL, load=load())  # noqa: E731
    return Announcer(replicas, registration=entry, load=load, interval_s=interval_s, pause_s=pause_s)


@contextlib.asynccontextmanager
async def running(announced: Announcer, directory: FakeDirectory) -> AsyncIterator[asyncio.Task]:
    task = asyncio.create_task(announced.run())
    await directory.until(1)
    yield task
    task.cancel()


class Pages:
    free = 100

    def __call__(self) -> Load:
        return Load(available_pages={"full": self.free}, total_pages={"full": 1000})


async def test_where_a_node_stands_with_the_directory():
    directory = FakeDirectory()
    announced = announcer(directory)

    async def after(problem: BridgeError | None) -> tuple[str, str]:
        directory.problem = problem
        await announced.beat()
        return announced.state.value, announced.obstacle

    assert (announced.state.value, "does not know this node" in announced.obstacle) == ("unreachable", True)
    assert await after(AWAY) == ("unreachable", "bootstrap does not know this node: away")
    assert await after(ConflictError("no")) == ("refused", "bootstrap refuses this node: no")
    assert await after(None) == ("registered", "")
    assert await after(AWAY) == ("unreachable", ""), "it was known, and rooms cross without bootstrap"
    assert announced.problem == "away"
    assert await after(NotFoundError("?")) == ("unreachable", ""), "it is told at once, and has not refused this node"
    assert await after(UnauthorizedError("which token?")) == ("refused", "bootstrap refuses this node: which token?")
    assert await after(None) == ("registered", "")
    state, obstacle = await after(StaleError("another has it"))
    assert (state, "another process has taken this node's name" in obstacle) == ("replaced", True)
    assert await after(AWAY) == ("replaced", obstacle), "a name that is lost stays lost while bootstrap is away"
    await announced.leave()
    assert (announced.state.value, announced.obstacle, announced.problem) == ("none", "", ""), "it left for good"
    assert directory.calls.count("register") == 5


async def test_an_address_that_is_no_bootstrap_is_said_to_be_none():
    directory = FakeDirectory()
    directory.problem = NotFoundError("no route /v1/instances/i/nodes/n; see /openapi.json")
    announced = announcer(directory)
    await announced.beat()
    assert announced.state == "refused"
    assert "http://bootstrap.test is no bootstrap (bootstrap.url)" in announced.obstacle
    assert not announced._changed.is_set()  # another look at once would find the same


@pytest.mark.parametrize("problem", [StaleError("another has your name"), NotReadyError("its Redis is away")])
async def test_a_problem_is_said_once_and_shown_until_it_is_over(problem, capsys):
    directory = FakeDirectory()
    announced = announcer(directory)
    await announced.beat()
    for directory.problem in (problem, problem, problem):
        await announced.beat()
    assert str(problem) in announced.problem
    refused = isinstance(problem, StaleError)
    assert "".join(capsys.readouterr()).count("bootstrap_refused" if refused else "bootstrap_call_failed") == 1
    directory.problem = None
    await announced.beat()
    assert (announced.problem, announced.refusal) == ("", "")


@pytest.mark.parametrize("steps", range(4))
async def test_an_end_that_meets_news_is_an_end(steps):
    """The daemon cancels the heartbeats when it stops, and its readiness may change in the same moment."""
    directory = FakeDirectory()
    announced = announcer(directory)
    async with running(announced, directory) as task:
        async with asyncio.timeout(WAIT_S):
            while not announced._changed._waiters:  # noqa: ASYNC110 - until it waits for news, which nothing tells
                await asyncio.sleep(0.001)
        announced.look(["the pools are being made"])
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=WAIT_S / 10)
    assert done == {task}


async def test_who_has_left_does_not_come_back():
    """A heartbeat under way would be answered with "unknown", and unknown nodes register again."""
    directory = FakeDirectory()
    announced = announcer(directory, interval_s=0.005)
    async with running(announced, directory) as task:
        directory.hold = asyncio.Event()
        calls = len(directory.calls)
        await directory.until(calls + 1)
        leaving = asyncio.create_task(announced.leave())
        await asyncio.sleep(0)
        directory.hold.set()
        async with asyncio.timeout(WAIT_S):
            await leaving
            await task
    assert directory.calls[-1] == "deregister"
    assert directory.calls.count("register") == 1


async def test_free_pages_are_told_before_the_next_interval_and_not_without_pause():
    directory, load = FakeDirectory(), Pages()
    announced = announcer(directory, load=load)
    async with running(announced, directory):
        announced.look()
        load.free = 0
        announced.look()
        await directory.until(2)
        for load.free in range(1, 50):
            announced.look()
        await directory.until(3)
    assert directory.calls == ["register", "heartbeat", "heartbeat"]
    slow = announcer(directory := FakeDirectory(), load=load, pause_s=30)
    async with running(slow, directory):
        for load.free in range(1, 50):
            slow.look()
            await asyncio.sleep(0)
    assert directory.calls == ["register"]


async def test_changes_waits_for_a_directory_that_is_away():
    """The directory is asked again at the interval, and a busy node must not make that a storm."""
    directory, load = FakeDirectory(), Pages()
    announced = announcer(directory, load=load)
    for directory.problem, free in ((None, 30), (AWAY, 20), (None, 90)):
        await announced.beat()
        load.free = free
        announced.look()
        assert announced._changed.is_set() is (directory.problem is None)
        announced._changed.clear()


async def test_a_replica_that_does_not_answer_hands_over_to_the_next():
    first, second = FakeDirectory(), FakeDirectory()
    announced = announcer(first, second)
    async with running(announced, first):
        first.problem = PeerError("nobody is there")
        announced._changed.set()
        await second.until(1)  # at once, not after an interval
        assert (first.calls, second.calls) == (["register", "heartbeat"], ["heartbeat"])
        assert announced.problem == ""
        second.problem = NotReadyError("its store is away")
        announced._changed.set()
        await first.until(3)
        assert announced.problem == "nobody is there"
        assert len(second.calls) == 2, "both have failed: that is tried again at the next interval"
        first.problem = None
        announced._changed.set()
        await second.until(3)
        await first.until(4)
        assert announced.problem == ""


async def test_a_replica_that_is_no_bootstrap_hands_over_to_the_next_and_says_nothing_of_the_name():
    other, real = FakeDirectory(), FakeDirectory()
    announced = announcer(other, real)
    for other.problem, state in ((StaleError("another has your name"), "replaced"), (NotFoundError("?"), "refused")):
        await announced.beat()
        assert announced.state == state
    await announced.beat()
    assert (other.calls, real.calls) == (["register"] * 2, ["register"])
    assert announced.obstacle == ""
