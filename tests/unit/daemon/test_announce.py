"""The heartbeats of a daemon, against a directory that only writes down what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvbridge.api.directory import Load, NodeRegistration
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import (
    BridgeError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    PeerError,
    StaleError,
    UnauthorizedError,
)
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Rank
from kvbridge.daemon.announce import Announcer
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.peer_setup import control_modes
from kvbridge.daemon.prefill import prefill_daemon

INTERVAL_S = 0.005
WAIT_S = 20.0


class FakeDirectory:
    """Answers with what `problem` says."""

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


def announcer(
    *replicas: FakeDirectory, interval_s: float = INTERVAL_S, load: Callable[[], Load] = Load, pause_s: float = 0.001
) -> Announcer:
    def registration() -> NodeRegistration:
        return NodeRegistration(
            instance="i",
            node="n",
            role="prefill",
            incarnation="1" * 16,
            http_url="http://127.0.0.1:1",
            control=PeerAddress(endpoint="tcp://127.0.0.1:2"),
            pp_size=1,
            tp_size=1,
            ranks=(Rank(pp=0, tp=0),),
            fingerprint="f",
            geometry=preset("tiny-gqa"),
        )

    return Announcer(
        replicas,  # type: ignore[arg-type]
        registration=registration,
        load=load,
        interval_s=interval_s,
        pause_s=pause_s,
    )


@pytest.mark.asyncio
async def test_a_bootstrap_that_will_not_register_a_node_again_makes_it_unready() -> None:
    directory = FakeDirectory()
    announced = announcer(directory, interval_s=60)
    for directory.problem in (None, NotFoundError("who?"), UnauthorizedError("which token?")):
        await announced.beat()
    assert announced.obstacle == "bootstrap refuses this node: which token?"


@pytest.mark.asyncio
@pytest.mark.parametrize("steps", range(4))
async def test_an_end_that_meets_news_is_an_end(steps: int) -> None:
    """The daemon cancels the heartbeats when it stops; in the same moment its readiness may change."""
    directory = FakeDirectory()
    announced = announcer(directory, interval_s=60)
    task = asyncio.create_task(announced.run())
    await directory.until(1)
    async with asyncio.timeout(WAIT_S):
        while not announced._changed._waiters:  # noqa: ASYNC110 - until it waits for news, which nothing tells
            await asyncio.sleep(0.001)
    announced.changed()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=WAIT_S / 10)
    task.cancel()
    assert done == {task}


@pytest.mark.asyncio
async def test_an_address_that_is_no_bootstrap_is_said_to_be_none() -> None:
    directory = FakeDirectory()
    directory.problem = NotFoundError("no route /v1/instances/i/nodes/n; see /openapi.json")
    announced = announcer(directory, interval_s=60)
    await announced.beat()
    assert announced.state == "refused"
    assert "http://bootstrap.test is no bootstrap (bootstrap.url)" in announced.obstacle
    assert not announced._changed.is_set()  # another look at once would find the same


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("problem", "refused"),
    [
        (ConflictError("two processes use one name"), True),
        (StaleError("another has your name"), True),
        (UnauthorizedError("which token?"), True),
        (PeerError("away"), False),
        (NotReadyError("the directory's Redis is away"), False),
    ],
)
async def test_a_directory_that_would_not_have_us_is_another_thing_than_one_that_is_away(
    problem: BridgeError, refused: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = FakeDirectory()
    directory.problem = problem
    announced = announcer(directory)
    for _ in range(3):
        await announced.beat()
    assert (str(problem) in announced.refusal) is refused
    assert "".join(capsys.readouterr()).count("bootstrap_refused" if refused else "bootstrap_call_failed") == 1
    directory.problem = None
    await announced.beat()
    assert announced.refusal == ""


@pytest.mark.asyncio
async def test_a_name_that_is_lost_stays_lost_while_bootstrap_is_away() -> None:
    directory = FakeDirectory()
    announced = announcer(directory)
    for directory.problem in (StaleError("another has your name"), PeerError("away")):
        await announced.beat()
    assert "another has your name" in announced.refusal


@pytest.mark.asyncio
async def test_where_a_node_stands_with_the_directory() -> None:
    directory = FakeDirectory()
    announced = announcer(directory)

    async def after(problem: BridgeError | None) -> tuple[str, str]:
        directory.problem = problem
        await announced.beat()
        return announced.state.value, announced.obstacle

    assert (announced.state.value, "does not know this node" in announced.obstacle) == ("unreachable", True)
    assert await after(PeerError("away")) == ("unreachable", "bootstrap does not know this node: away")
    assert await after(ConflictError("no")) == ("refused", "bootstrap refuses this node: no")
    assert await after(None) == ("registered", "")
    assert await after(PeerError("away")) == ("unreachable", ""), "it was known, and rooms cross without bootstrap"
    assert await after(NotFoundError("who?")) == ("unreachable", ""), (
        "it is told at once, and has not refused this node"
    )
    assert await after(None) == ("registered", "")
    state, obstacle = await after(StaleError("another has it"))
    assert (state, "another process has taken this node's name" in obstacle) == ("replaced", True)
    directory.problem = PeerError("away")
    await announced.leave()
    assert (announced.state.value, announced.obstacle, announced.problem) == ("none", "", ""), "it left for good"


@pytest.mark.parametrize(
    ("keys", "insecure", "listening", "expected"),
    [
        (False, False, "tcp://127.0.0.1:7", "local"),
        (False, True, "tcp://10.0.0.1:7", "plain"),
        (True, False, "tcp://10.0.0.1:7", "curve"),
        (False, False, "", "local"),
        (False, True, "", "local plain"),
        (True, False, "", "curve"),
        (True, True, "", "curve local plain"),
    ],
)
def test_how_a_node_can_be_met(keys: bool, insecure: bool, listening: str, expected: str) -> None:
    curve = {"curve": {"secret_key_file": "/nowhere"}} if keys else {}
    pools = {"memory": "adopted", "host": {"pages": 8}}
    config = DecodeConfig(instance="i", model={"preset": "tiny-v4"}, pools=pools, control=curve, insecure=insecure)
    address = PeerAddress(endpoint=listening, public_key="k" * 40 * keys) if listening else None
    assert " ".join(control_modes(config, address)) == expected


@pytest.mark.asyncio
async def test_who_has_left_does_not_come_back() -> None:
    """Not even when a heartbeat is under way: its answer would be "unknown", and unknown nodes register again."""
    directory = FakeDirectory()
    announced = announcer(directory)
    task = asyncio.create_task(announced.run())
    await directory.until(1)
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


def pages(**free: int) -> Load:
    return Load(available_pages=free, total_pages=dict.fromkeys(free, 1000))


@pytest.mark.asyncio
async def test_free_pages_are_told_before_the_next_interval_and_not_without_pause() -> None:
    directory, free = FakeDirectory(), [100]
    announced = announcer(directory, interval_s=60, load=lambda: pages(full=free[0]))
    task = asyncio.create_task(announced.run())
    await directory.until(1)
    announced.look()
    free[0] = 0
    announced.look()
    await directory.until(2)
    for free[0] in range(1, 50):
        announced.look()
    await directory.until(3)
    task.cancel()
    assert directory.calls == ["register", "heartbeat", "heartbeat"]


@pytest.mark.asyncio
async def test_changes_is_not_told_more_often_than_the_pause_allows() -> None:
    directory, free = FakeDirectory(), [100]
    announced = announcer(directory, interval_s=60, load=lambda: pages(full=free[0]), pause_s=30)
    task = asyncio.create_task(announced.run())
    await directory.until(1)
    for free[0] in range(1, 50):
        announced.look()
        await asyncio.sleep(0)
    task.cancel()
    assert directory.calls == ["register"]


def test_an_engine_cannot_attach_to_memory_that_is_not_there_yet() -> None:
    config = PrefillConfig(instance="i", model={"preset": "tiny-gqa"}, pools={"device": {"full": 8}})
    node = prefill_daemon(config)
    with pytest.raises(NotReadyError, match="memory is being created"):
        node.parts.attached(1, (Rank(pp=0, tp=0),))


def test_an_engine_with_memory_of_its_own_waits_for_the_host_pool_too() -> None:
    model, rank = {"preset": "tiny-v4"}, (Rank(pp=0, tp=0),)
    pools = {"memory": "adopted", "host": {"pages": 8}}
    with pytest.raises(NotReadyError, match="memory is being created"):
        decode_daemon(DecodeConfig(instance="i", model=model, pools=pools)).parts.attached(1, rank)
    prefill = prefill_daemon(PrefillConfig(instance="i", model=model, pools={"memory": "adopted"}))
    assert prefill.parts.attached(1, rank).host == ()


@pytest.mark.asyncio
async def test_a_replica_that_does_not_answer_hands_over_to_the_next():
    first, second = FakeDirectory(), FakeDirectory()
    announced = announcer(first, second, interval_s=60)
    task = asyncio.create_task(announced.run())
    try:
        await first.until(1)
        first.problem = PeerError("nobody is there")
        announced.changed()
        await second.until(1)  # at once, not after an interval
        assert first.calls == ["register", "heartbeat"]
        assert second.calls == ["heartbeat"]
        assert announced.problem == ""
        second.problem = NotReadyError("its store is away")
        announced.changed()
        await first.until(3)
        assert announced.problem == "nobody is there"
        assert len(second.calls) == 2, "both have failed: that is tried again at the next interval"
        first.problem = None
        announced.changed()
        await second.until(3)
        await first.until(4)
        assert announced.problem == ""
    finally:
        task.cancel()


@pytest.mark.asyncio
async def test_a_replica_that_is_no_bootstrap_hands_over_to_the_next_and_says_nothing_of_the_name() -> None:
    other, real = FakeDirectory(), FakeDirectory()
    announced = announcer(other, real, interval_s=60)
    other.problem = StaleError("another has your name")
    await announced.beat()
    assert announced.state == "replaced"
    other.problem = NotFoundError("no such route")
    await announced.beat()
    assert announced.state == "refused"
    await announced.beat()
    assert (other.calls, real.calls) == (["register"] * 2, ["register"])
    assert announced.obstacle == ""


@pytest.mark.asyncio
@pytest.mark.parametrize("problem", [PeerError("away"), StaleError("another has your name")])
async def test_a_problem_is_shown_until_it_is_over(problem: BridgeError) -> None:
    directory = FakeDirectory()
    announced = announcer(directory)
    await announced.beat()
    assert announced.problem == ""
    directory.problem = problem
    await announced.beat()
    assert str(problem) in announced.problem
    directory.problem = None
    await announced.beat()
    assert announced.problem == ""
    assert directory.calls == ["register", "heartbeat", "heartbeat"]


@pytest.mark.asyncio
async def test_changes_waits_for_a_directory_that_is_away() -> None:
    """It is asked again at the interval; a busy node must not make that a storm."""
    directory, free = FakeDirectory(), [100]
    announced = announcer(directory, interval_s=60, load=lambda: pages(full=free[0]))
    await announced.beat()
    directory.problem = NotReadyError("the directory's Redis is away")
    await announced.beat()
    free[0] = 50
    announced.look()
    assert not announced._changed.is_set()
    directory.problem = None
    await announced.beat()
    free[0] = 80
    announced.look()
    assert announced._changed.is_set()
