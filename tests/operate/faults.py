"""For every alert a fault in real daemons that it is for.

Owns: the faults, which alerts each must set off, and which it may set off besides. Must not know: Prometheus, or how long to wait.

A fault opens a stage, and returns what is to be done again and again while one waits: rooms that pass, or fail, as users would
see it. Whatever it started ends with its context.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from kvbridge.cli.local_cluster import Cluster, ClusterSpec, DaemonProcess, NodeSpec, plan_cluster
from kvbridge.core.errors import BridgeError
from tests.faults.cells import HEARTBEAT_S, PEER_SILENCE_S
from tests.faults.fault_cluster import DEVICE_PAGES, HALF, HOST_PAGES, TIMEOUTS, TOKENS, FaultCluster, scene
from tests.helpers.cluster import cluster, eventually
from tests.helpers.faulty_transport import faulty_worker
from tests.helpers.live_rooms import http
from tests.helpers.mutated_daemon import mutated
from tests.helpers.raw_peers import RawDecode
from tests.helpers.redis_server import RedisServer, redis_server

LATE_S = 6.0
"""A claim that is later than the alert allows."""


@dataclass
class Stage:
    """Daemons to be watched, before anything is wrong."""

    daemons: list[DaemonProcess]
    well: Callable[[], object]
    """Something that works now; engines are attached with it."""
    strike: Callable[[], object]
    again: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Fault:
    """What is wrong, and who has to say so."""

    name: str
    stage: Callable[[], AbstractContextManager[Stage]]
    alerts: frozenset[str]
    besides: frozenset[str] = field(default_factory=frozenset)


FAULTS: list[Fault] = []


def fault(alerts: str, besides: str = "") -> Callable[[Callable[[], Iterator[Stage]]], Callable[[], Iterator[Stage]]]:
    """Put a fault into the list; alerts are named without `Kvbridge`."""

    def names(words: str) -> frozenset[str]:
        return frozenset(f"Kvbridge{word}" for word in words.split())

    def note(stage: Callable[[], Iterator[Stage]]) -> Callable[[], Iterator[Stage]]:
        FAULTS.append(Fault(stage.__name__, contextmanager(stage), names(alerts), names(besides)))
        return stage

    return note


def daemons(stage: FaultCluster) -> list[DaemonProcess]:
    return stage.cluster.all()


def tried(call: Callable[..., object], *arguments: Any) -> None:
    """Do something that may be refused; that it is, is what others are to notice."""
    with suppress(BridgeError, AssertionError):
        call(*arguments)


@fault("DaemonDown NotRegistered", besides="DaemonNotReady")
def bootstrap_dies() -> Iterator[Stage]:
    with scene() as stage:
        yield Stage(daemons(stage), stage.cross, stage.bootstrap.kill, stage.cross)


@fault("NoPairPossible DaemonDown PairingsRefused", besides="DaemonNotReady")
def the_only_decode_daemon_dies() -> Iterator[Stage]:
    with scene() as stage:
        yield Stage(
            daemons(stage),
            stage.cross,
            stage.decode.kill,
            lambda: http("POST", stage.bootstrap, "/v1/requests", json={"prompt_tokens": 1}),
        )


@fault("WorkerDied DaemonNotReady", besides="NoPairPossible PairingsRefused RoomsFailing")
def a_rank_worker_dies_again_and_again() -> Iterator[Stage]:
    with scene() as stage:

        def kill() -> None:
            assert stage.prefill.process is not None
            for child in psutil.Process(stage.prefill.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()

        yield Stage(daemons(stage), stage.cross, kill, kill)


@fault("EngineMissing RoomsTimeOut", besides="RoomsFailing")
def no_engine_takes_its_rooms() -> Iterator[Stage]:
    with scene(timeouts={"begin_s": 2.0}) as stage:
        yield Stage(daemons(stage), stage.cross, stage.detach, lambda: tried(stage.pair))


@fault("RoomsFailing", besides="AdmissionsRefused PoolNearlyFull")
def the_transport_fails() -> Iterator[Stage]:
    with scene(faults={"fail_after_operations": 0}) as stage:

        def again() -> None:
            room = stage.pair()
            tried(stage.sender.call, "begin", room, TOKENS)
            tried(stage.sender.call, "write", room, TOKENS, 0, TOKENS)
            stage.end(stage.decode, room)
            tried(stage.sender.call, "abort", room)

        yield Stage(daemons(stage), lambda: None, lambda: None, again)


@fault("DigestMismatch", besides="RoomsFailing")
def a_bit_flips_on_the_way() -> Iterator[Stage]:
    with scene(decode={"integrity": {"digest": "crc32c"}}, faults={"flip_bit_in_operation": 1}) as stage:

        def flip() -> None:
            room = stage.pair()
            stage.sender.call("begin", room, TOKENS)
            stage.sender.call("write", room, TOKENS, 0, TOKENS)
            stage.sender.call("finish", room)
            assert stage.end(stage.decode, room)[:2] == ("failed", "digest_mismatch")

        yield Stage(daemons(stage), lambda: None, flip)


@fault("ClaimsLate")
def the_decode_engine_is_late() -> Iterator[Stage]:
    with scene() as stage:
        waiting: list[tuple[float, int]] = []

        def again() -> None:
            if len(waiting) < 12:
                room = stage.pair()
                stage.sender.call("begin", room, TOKENS)
                stage.sender.call("write", room, TOKENS, 0, TOKENS)
                stage.sender.call("finish", room)
                waiting.append((time.monotonic(), room))
            while waiting and time.monotonic() - waiting[0][0] > LATE_S:
                _, room = waiting.pop(0)
                stage.reader.call("claim", room, TOKENS)
                stage.reader.call("release", room)

        yield Stage(daemons(stage), stage.cross, lambda: None, again)


@fault("PagesQuarantined QuarantineLarge", besides="WritersShutOut")
def a_writer_hangs() -> Iterator[Stage]:
    """It maps the pool and proves nothing, so that what it was given cannot be given to others."""
    with scene(timeouts={"worker_silence_s": 3600.0}) as stage:

        def hang() -> None:
            rooms = [stage.pair() for _ in range(10)]
            stage.taken(rooms)
            for room in rooms:
                stage.sender.call("begin", room, TOKENS)
            os.kill(stage.worker_pid(stage.prefill), signal.SIGSTOP)
            for room in rooms:
                stage.sender.call("write", room, TOKENS, 0, HALF)
                stage.cancel(stage.decode, room)

        yield Stage(daemons(stage), stage.cross, hang)


@fault("PoolNearlyFull Starved AdmissionsRefused PairingsRefused")
def more_comes_than_fits() -> Iterator[Stage]:
    with scene(timeouts={"begin_s": 3600.0, "offer_s": 3600.0}) as stage:

        def ask() -> None:
            for daemon in (stage.prefill, stage.bootstrap):
                http("POST", daemon, "/v1/requests", json={"prompt_tokens": TOKENS})

        def fill() -> None:
            while http("POST", stage.prefill, "/v1/requests", json={"prompt_tokens": TOKENS}).status_code == 201:
                pass

        yield Stage(daemons(stage), stage.cross, fill, ask)


@fault(
    "PeerUnstable WritersShutOut",
    besides="DaemonDown DaemonNotReady NoPairPossible NotRegistered PairingsRefused RoomsFailing PagesQuarantined",
)
def a_prefill_node_freezes_again_and_again() -> Iterator[Stage]:
    with scene() as stage:

        def freeze() -> None:
            room = stage.pair()
            stage.taken([room])
            stage.sender.call("begin", room, TOKENS)
            pid = stage.pid(stage.prefill)
            os.kill(pid, signal.SIGSTOP)
            try:
                stage.end(stage.decode, room)
                time.sleep(HEARTBEAT_S)
            finally:
                os.kill(pid, signal.SIGCONT)
            eventually("the end of the room", lambda: stage.end(stage.prefill, room)[0] in {"failed", "aborted"})
            tried(stage.sender.call, "abort", room)
            stage.wait_ready()

        assert PEER_SILENCE_S < 5
        yield Stage(daemons(stage), stage.cross, lambda: None, freeze)


@fault("FramesRefused")
def a_stranger_talks_to_the_control_port() -> Iterator[Stage]:
    with scene() as stage, RawDecode(stage.address["endpoint"]) as stranger:
        yield Stage(daemons(stage), stage.cross, lambda: None, lambda: stranger.put(b"GET / HTTP/1.1"))


@fault("FilesNearlyExhausted")
def files_run_out() -> Iterator[Stage]:
    with scene() as stage:

        def limit() -> None:
            process = psutil.Process(stage.pid(stage.prefill))
            process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 6, process.num_fds() + 6))

        yield Stage(daemons(stage), stage.cross, limit)


@fault("InternalErrors VersionsDiffer")
def a_release_with_a_defect() -> Iterator[Stage]:
    code = """
import kvbridge
kvbridge.__version__ = "0.0.9"
from kvbridge.daemon.node_status import NodeOverview
NodeOverview.status = lambda _self: 1 / 0
"""
    with cluster({"preset": "tiny-v4"}, wait=False) as started:
        started.decode.stop()
        started.decode = mutated(started.decode, daemon_code=code)
        started.decode.start()
        started.wait_ready()
        yield Stage(started.all(), lambda: None, lambda: http("GET", started.decode, "/status"))


NAMESPACE = "operate"


def _shared_directory(server: RedisServer) -> AbstractContextManager[Cluster]:
    directory = {"store": "redis", "redis_url": server.url, "namespace": NAMESPACE}
    return cluster({"preset": "tiny-v4"}, bootstrap={"directory": directory})


@fault("StoreValuesRefused", besides="InternalErrors")
def somebody_else_writes_into_the_store() -> Iterator[Stage]:
    with redis_server() as server, _shared_directory(server) as started, server.client() as client:

        def write() -> None:
            for key in client.scan_iter(f"{NAMESPACE}:node:*"):
                client.hset(key, "seen_ms", "soon")

        yield Stage(started.all(), lambda: None, write, write)


@fault("StoreFailing", besides="DaemonNotReady NotRegistered PairingsRefused NoPairPossible")
def the_store_hangs() -> Iterator[Stage]:
    with redis_server() as server, _shared_directory(server) as started:

        def ask() -> None:
            http("POST", started.bootstrap, "/v1/requests", json={"prompt_tokens": 1})

        try:
            yield Stage(started.all(), lambda: None, server.halt, ask)
        finally:
            server.go_on()


@fault("PeerSlow")
def one_of_three_prefill_nodes_is_slow() -> Iterator[Stage]:
    with _three_prefill_nodes() as (stage, nodes):
        engines = [FaultCluster(Cluster(stage.cluster.folder, stage.bootstrap, node, stage.decode)) for node in nodes]
        for each in engines:
            each.engines = {
                role: engine for role, engine in stage.engines.items() if role is engine.role and role == "decode"
            }

        def again() -> None:
            for each in engines:
                each.cross()

        try:
            assert stage.reader
            for each in engines:
                each.engines[stage.reader.role] = stage.reader
            yield Stage([*stage.cluster.all()], lambda: None, lambda: None, again)
        finally:
            for each in engines:
                each.engines.pop(stage.reader.role, None)
                each.detach()


@contextmanager
def _three_prefill_nodes() -> Iterator[tuple[FaultCluster, list[DaemonProcess]]]:
    with scene() as stage:
        waits, model = {"timeouts": TIMEOUTS}, {"preset": "tiny-v4"}
        nodes = [stage.prefill]
        for number, faults in ((1, {}), (2, {"delay_s": 1.0})):
            folder = stage.cluster.folder / f"more{number}"
            spec = ClusterSpec(
                model=model,
                transport="local",
                ends_with_us=True,
                prefill=NodeSpec(instance=f"prefill-{number}", pools={"device": DEVICE_PAGES}, more=waits),
                decode=NodeSpec(instance="unused", pools={"device": DEVICE_PAGES, "host": {"pages": HOST_PAGES}}),
            )
            node = plan_cluster(folder, spec).prefill
            node = mutated(node, worker_code=faulty_worker(faults)) if faults else node
            node.config = {"bootstrap": {"url": stage.bootstrap.url, "heartbeat_interval_s": 0.5}, **node.config}
            node.start()
            stage.cluster.others.append(node)
            nodes.append(node)
        stage.wait_ready()
        yield stage, nodes
