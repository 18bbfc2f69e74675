"""How daemons end and come back: signals, taken addresses, killed workers, killed daemons, a bootstrap that forgets.

One cluster serves the whole module; each test leaves it whole. What is in flight when something dies fails on both sides with the
reason, and the next room crosses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbridge.daemon.memory import file_prefix
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import (
    LiveCluster,
    all_free,
    ends,
    http,
    live_cluster,
    metric,
    raises_code,
    report,
    status,
)
from tests.helpers.matrices import kept
from tests.helpers.mutated_daemon import mutated

TOKENS = 1000
SHUTDOWN_ROOMS_S = 8.0
"""Long enough for a room to be looked at and to end meanwhile on a busy machine."""
SHUTDOWN_CLOSE_S = 16.0
SHUTDOWN_S = SHUTDOWN_ROOMS_S + SHUTDOWN_CLOSE_S
TIMEOUTS = {
    "shutdown_rooms_s": SHUTDOWN_ROOMS_S,
    "shutdown_close_s": SHUTDOWN_CLOSE_S,
    "control_heartbeat_s": 0.2,
    "worker_silence_s": 6.0,
}
RESTART_S = 2.5
_LATER = f"""
from kvbridge.daemon import supervisor

supervisor.FIRST_PAUSE_S = supervisor.LONGEST_PAUSE_S = {RESTART_S}
"""
"""A rank worker that has ended is missed for a while before the next one is there, however slowly that is looked at."""


def restarting_later(daemon: DaemonProcess) -> DaemonProcess:
    return daemon if daemon.role == "bootstrap" else mutated(daemon, daemon_code=_LATER)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    # Names that no other run on this machine has.
    mine = {"timeouts": TIMEOUTS}
    prefill, decode = (mine | {"instance": f"{role}-{os.getpid()}"} for role in ("prefill", "decode"))
    with live_cluster(prefill=prefill, decode=decode, change=restarting_later) as running:
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def _whole_again(live: LiveCluster) -> Iterator[None]:
    """Whatever a test has ended is started again."""
    yield
    live.detach()
    for each in live.cluster.all():
        if each.process is not None and each.process.poll() is not None:
            each.start()
    live.cluster.wait_ready()


@pytest.fixture(params=["prefill", "decode"])
def daemon(live: LiveCluster, request: pytest.FixtureRequest) -> DaemonProcess:
    return getattr(live, request.param)


def other(live: LiveCluster, daemon: DaemonProcess) -> DaemonProcess:
    return live.decode if daemon is live.prefill else live.prefill


def in_flight(live: LiveCluster) -> int:
    """A room that is half way across; both engines are attached."""
    assert live.reader
    room = live.pair(TOKENS)
    live.write(room, TOKENS, 0, 500)
    eventually("the transfer begun", lambda: report(live.prefill, room)["state"] == "transferring")
    return room


def pid(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return daemon.process.pid


def worker_pid(daemon: DaemonProcess) -> int:
    return int(status(daemon)["ranks"][0]["pid"])


def exit_code(daemon: DaemonProcess, timeout_s: float = SHUTDOWN_S + 2) -> int:
    """Wait for the end of a daemon's process. The two seconds more are for a machine with other work."""
    assert daemon.process is not None
    try:
        return daemon.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{daemon.name} runs on after {timeout_s} s:\n{daemon.log(20)}") from None


def gone(process: int) -> bool:
    """Whether a process has ended (one that nobody has waited for counts)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def shared_files(daemon: DaemonProcess, folder: Path = DEFAULT_DIRECTORY) -> set[str]:
    """The names of a daemon's pools in shared memory."""
    prefix = file_prefix(str(daemon.config["instance"]), f"{daemon.role}-node-0")
    return {path.name for path in folder.iterdir() if path.name.startswith(prefix)}


def restarted(live: LiveCluster, daemon: DaemonProcess) -> None:
    """Start a daemon again; engines have to attach anew."""
    live.detach()
    daemon.start()
    live.cluster.wait_ready()


# ------------------------------------------------------------------------------------------- signals


def to_one(daemon: DaemonProcess) -> None:
    daemon.kill(signal.SIGTERM)


def to_the_group(daemon: DaemonProcess) -> None:
    """What a shell does (`kill %1`)."""
    os.killpg(pid(daemon), signal.SIGTERM)


def to_all(daemon: DaemonProcess) -> None:
    """What systemd does, workers first."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(worker_pid(daemon), number)
    daemon.kill(signal.SIGTERM)


def listed(live: LiveCluster) -> list[str]:
    """The instances that the directory knows."""
    return [each["instance"] for each in http("GET", live.cluster.bootstrap, "/v1/instances").json()]


@pytest.mark.parametrize("tell", [kept(to_one, False), to_the_group, kept(to_all, False)])
def test_sigterm_lets_rooms_end(
    live: LiveCluster, daemon: DaemonProcess, tell: Callable[[DaemonProcess], None]
) -> None:
    room = in_flight(live)
    workers = worker_pid(daemon)
    earlier = len(daemon.log_path.read_text())
    tell(daemon)
    eventually("draining", lambda: http("GET", daemon, "/ready").status_code == 503)
    assert http("GET", daemon, "/ready").json()["reasons"] == ["the daemon is shutting down"]
    assert http("GET", daemon, "/health").status_code == 200
    prefill = [{"endpoint": live.control}] if daemon is live.decode else []
    refused = http("POST", daemon, "/v1/requests", json={"prompt_tokens": 1, "prefill": prefill})
    assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
    assert "Retry-After" in refused.headers
    instance = daemon.config["instance"]
    eventually("off the directory", lambda: instance not in listed(live))
    assert not gone(pid(daemon)), "a room is in flight"
    assert not gone(workers)

    live.write(room, TOKENS, 500, TOKENS)
    live.sender.finish(room)
    live.read(room, TOKENS)
    live.reader.release(room)
    assert exit_code(daemon) == 0
    said = [json.loads(line) for line in daemon.log_path.read_text()[earlier:].splitlines()]
    # On a slow machine a message may come twice before it is acknowledged.
    assert not [each for each in said if each["level"] not in {"debug", "info"} and each.get("kind") != "duplicate"], (
        said
    )
    assert [each["limit_s"] for each in said if each["event"] == "draining"] == [SHUTDOWN_ROOMS_S]
    assert instance not in listed(live)
    assert gone(workers)
    assert not shared_files(daemon)
    assert not list(daemon.runtime_dir.glob("*.json")), "a closed endpoint is not announced"
    all_free(other(live, daemon))
    restarted(live, daemon)
    live.serves()


def test_rooms_that_do_not_end_are_aborted_within_the_limit(live: LiveCluster, daemon: DaemonProcess) -> None:
    room = in_flight(live)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http, "GET", daemon, f"/v1/requests/{room}?wait=15")
        began_s = time.monotonic()
        daemon.kill(signal.SIGTERM)
        final = asked.result(20).json()
        assert exit_code(daemon) == 0
    assert SHUTDOWN_ROOMS_S < time.monotonic() - began_s < SHUTDOWN_S + 2
    assert (final["state"], final["reason_code"]) == ("aborted", "aborted")
    assert final["reason"] == "the daemon was shut down"
    survivor = other(live, daemon)
    told = http("GET", survivor, f"/v1/requests/{room}?wait=15").json()
    assert told["reason_code"] == "aborted"
    assert "the daemon was shut down" in told["reason"]
    if survivor is live.prefill:
        live.sender.abort(room, "told so")
    all_free(survivor)
    restarted(live, daemon)
    live.serves()


def test_a_second_signal_ends_the_drain(live: LiveCluster, daemon: DaemonProcess) -> None:
    in_flight(live)
    earlier = len(daemon.log_path.read_text())
    daemon.kill(signal.SIGINT)
    eventually("draining", lambda: http("GET", daemon, "/ready").status_code == 503)
    daemon.kill(signal.SIGTERM)
    assert exit_code(daemon) == 0
    assert not shared_files(daemon)
    said = daemon.log_path.read_text()[earlier:]
    assert '"effect": "closing now"' in said
    assert "rooms_aborted" not in said, "the drain went on to its end"


_SLOWLY = """
from kvbridge.daemon.memory import NodeMemory

create = NodeMemory._create


def slowly(memory, directory, prefix, on_progress):
    def progress(done, total):
        memory._cancelled.wait(60)
        on_progress(done, total)

    create(memory, directory, prefix, progress)


NodeMemory._create = slowly
"""
"""A daemon that is told to end before the first of its pools is whole."""


@pytest.mark.usefixtures("executed")
def test_sigterm_while_memory_is_made_leaves_nothing(live: LiveCluster) -> None:
    pools = {"device": {"full": 64, "swa": 16, "request": 8}, "host": {"size_bytes": 1 << 28}}
    starting = mutated(alone(live, pools=pools), daemon_code=_SLOWLY)
    starting.start()
    starting.endpoint()
    starting.kill(signal.SIGTERM)
    assert exit_code(starting) == 0
    assert not shared_files(starting)
    said = starting.log_path.read_text()
    assert "Traceback" not in said
    assert "memory_created" not in said


def test_whoever_starts_sweeps_what_the_dead_have_left(live: LiveCluster) -> None:
    """Of another instance, with another runtime directory: pools of the node, proofs of its workers."""
    folder = Path(tempfile.mkdtemp(prefix="life-", dir="/dev/shm"))
    pools = {"device": {"full": 64, "swa": 16, "request": 8}, "host": {"pages": 64, "directory": str(folder)}}
    first, second = (alone(live, name, pools=pools) for name in ("first", "second"))
    try:
        first.start()
        first.wait_ready()
        os.kill(worker_pid(first), signal.SIGKILL)  # before its node, whose end it might see and tidy up
        first.wait_ready()
        first.kill()
        left = set(folder.iterdir())
        assert {path.name.partition("-")[0] for path in left} == {"kvbridge", ".kvbridge"}
        second.start()
        second.wait_ready()
        assert not left & set(folder.iterdir())
        second.kill()

        left = shared_files(second, folder)
        assert left

        def all_named() -> bool:
            told = clean(folder, "--dry-run")
            return told.returncode == 0 and all(name in told.stdout for name in left)

        # The last worker ends a moment after its node.
        eventually("they are named", all_named)
        eventually("a clean folder", lambda: clean(folder).returncode == 0 and not set(folder.iterdir()))
    finally:
        first.kill()
        second.kill()
        shutil.rmtree(folder)


def alone(live: LiveCluster, name: str = "alone", **more: object) -> DaemonProcess:
    """A decode daemon that nobody knows."""
    daemon = DaemonProcess("decode", name, live.cluster.folder / name)
    daemon.config = live.decode.config | {
        "instance": f"{name}-{os.getpid()}",
        "runtime_dir": str(daemon.runtime_dir),
        "bootstrap": {"url": ""},
        **more,
    }
    return daemon


def clean(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvbridge", "clean", "--directory", str(folder), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "COLUMNS": "300"}
    )


# ------------------------------------------------------------------------------------------- starts that cannot be


def test_what_is_taken_is_named_and_ends_the_start(live: LiveCluster) -> None:
    """All at once, since most of the time goes into importing."""
    http_port = live.prefill.url.rpartition(":")[2]
    control_port = live.control.rpartition(":")[2]
    missing = live.cluster.folder / "no-such-file.json"
    wrong = [
        ("decode", {"pools": {"device": {"full": 8}, "host": {"pages": 8}}}, "pools.device.request"),
        ("prefill", {"timeouts": {"transfer_s": 1000}}, "transfer_s"),
    ]
    unavailable = [
        ("prefill", {"http": {"port": int(http_port)}}, f"http.port {http_port}"),
        ("decode", {"http": {"port": int(http_port)}}, f"http.port {http_port}"),
        ("bootstrap", {"http": {"port": int(http_port)}}, f"http.port {http_port}"),
        ("prefill", {"control": {"bind": f"tcp://127.0.0.1:{control_port}"}}, f"127.0.0.1:{control_port} is taken by"),
        ("prefill", {"runtime_dir": str(live.prefill.runtime_dir)}, str(live.prefill.runtime_dir)),
        ("prefill", {"runtime_dir": str(live.decode.runtime_dir)}, "another process serves"),
        ("decode", {"model": {"hf_config": str(missing)}}, str(missing)),
        ("decode", {"pools": decode_pools("/no/such/place")}, "pools.host.directory: /no/such/place: No such file"),
        ("decode", {"pools": decode_pools("/proc")}, "pools.host.directory: /proc is on a file system of type 0x9fa0"),
    ]
    cases = [(*case, 2) for case in wrong] + [(*case, 3) for case in unavailable]
    started = []
    for number, (role, change, text, code) in enumerate(cases):
        folder = live.cluster.folder / f"s{number}"
        refused = DaemonProcess(role, f"{role} {change}", folder)
        if role != "bootstrap":
            # Any free address, since other tests have pinned the one of the prefill node.
            own = {"runtime_dir": str(refused.runtime_dir), "control": {}}
            refused.config = getattr(live, role).config | own
        refused.config = refused.config | change
        refused.start()
        started.append((refused, text, code))
    try:
        for refused, text, code in started:
            assert exit_code(refused, 60) == code, refused.log()
            lines = [line for line in refused.log().splitlines() if not line.startswith("{")]
            assert text in "\n".join(lines), refused.log()
            assert "Traceback" not in refused.log()
            assert len(lines) <= 3, refused.log()
    finally:
        for refused, *_ in started:
            refused.kill()
    assert live.prefill.endpoint().pid == pid(live.prefill), "the endpoint file is still its owner's"
    live.serves()


def decode_pools(directory: str) -> dict[str, object]:
    return {"device": {"full": 8, "swa": 4, "request": 2}, "host": {"pages": 8, "directory": directory}}


# ------------------------------------------------------------------------------------------- rank workers


def test_a_killed_worker_fails_its_rooms_and_comes_back(live: LiveCluster, daemon: DaemonProcess) -> None:
    room = in_flight(live)
    before = worker_pid(daemon)
    restarts = metric(daemon, "kvbridge_worker_restarts_total", reason="killed")
    os.kill(before, signal.SIGKILL)
    answer = eventually("not ready", lambda: (found := http("GET", daemon, "/ready")).status_code == 503 and found)
    assert "rank worker pp0.tp0 is not there: killed by SIGKILL" in answer.json()["reasons"][0]
    refused = http("POST", daemon, "/v1/requests", json={"prompt_tokens": 1})
    assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")

    sides = {
        side.role: http("GET", side, f"/v1/requests/{room}?wait=15").json() for side in (live.prefill, live.decode)
    }
    for told in sides.values():
        assert told["reason_code"] == "worker_gone", told
        assert f"rank worker pp0.tp0 of the {daemon.role} node died: killed by SIGKILL" in told["reason"]
    assert sides[daemon.role]["state"] == "failed"
    live.sender.abort(room, "told so")

    daemon.wait_ready()
    rank = status(daemon)["ranks"][0]
    assert rank["pid"] != before
    assert rank["restarts"] == restarts + 1
    assert metric(daemon, "kvbridge_worker_restarts_total", reason="killed") == restarts + 1
    live.serves()


def test_a_claimed_room_survives_its_worker(live: LiveCluster) -> None:
    """The memory is the node's: what has arrived can be read whatever becomes of the worker."""
    assert live.reader
    room = live.pair(TOKENS)
    live.write(room, TOKENS)
    live.sender.finish(room)
    live.read(room, TOKENS)
    os.kill(worker_pid(live.decode), signal.SIGKILL)
    eventually("not ready", lambda: http("GET", live.decode, "/ready").status_code == 503)
    assert report(live.decode, room)["state"] == "claimed"
    live.reader.extend(room, TOKENS + 300)
    live.reader.release(room)
    assert ends(live.decode, room, "completed") == ""
    live.decode.wait_ready()
    live.serves()


def test_a_worker_that_hangs_is_killed(live: LiveCluster, daemon: DaemonProcess) -> None:
    room = in_flight(live)
    before = worker_pid(daemon)
    os.kill(before, signal.SIGSTOP)
    live.write(room, TOKENS, 500, TOKENS)
    reason = ends(daemon, room, "failed", "worker_gone")
    assert "timeouts.worker_silence_s" in reason
    assert gone(before)
    ends_with = http("GET", other(live, daemon), f"/v1/requests/{room}?wait=15").json()
    assert ends_with["reason_code"] == "worker_gone"
    live.sender.abort(room, "told so")
    daemon.wait_ready()
    live.serves()


# ------------------------------------------------------------------------------------------- whole daemons


@pytest.mark.usefixtures("executed")
def test_a_killed_prefill_daemon_is_noticed_and_shut_out_and_its_next_life_served(live: LiveCluster) -> None:
    """The decode side needs nothing of the dead one, nor of its next life, to use the pages again."""
    room = in_flight(live)
    worker, files = worker_pid(live.prefill), shared_files(live.prefill)
    control, epoch = live.control, metric(live.decode, "kvbridge_endpoint_epoch")
    assert files
    live.prefill.kill()
    eventually("no worker without its node", lambda: gone(worker))
    raises_code("peer_failed", lambda: live.sender.publish(room, TOKENS))

    reason = ends(live.decode, room, "failed", "peer_failed")
    assert "its connection is gone" in reason
    assert "timeouts.control_heartbeat_s" in reason
    all_free(live.decode)
    assert metric(live.decode, "kvbridge_endpoint_epoch") == epoch + 1
    assert http("GET", live.decode, "/ready").status_code == 200

    live.prefill.config = live.prefill.config | {"control": {"bind": control}}
    restarted(live, live.prefill)
    assert shared_files(live.prefill).isdisjoint(files), "swept at the next start"
    live.cross()
    live.serves()


def test_a_killed_decode_daemon_fails_its_rooms_on_the_other_side(live: LiveCluster) -> None:
    room = in_flight(live)
    worker, files = worker_pid(live.decode), shared_files(live.decode)
    assert len(files) == 2
    live.decode.kill()
    eventually("no worker without its node", lambda: gone(worker))
    raises_code("peer_failed", lambda: live.reader.claim(room))
    reason = ends(live.prefill, room, "failed", "peer_failed")
    assert "its connection is gone" in reason
    assert [(event.room, event.kind) for event in live.sender.events(20)] == [(room, "failed")]
    assert not status(live.prefill)["peers"]
    live.sender.abort(room, "told so")
    all_free(live.prefill)
    restarted(live, live.decode)
    assert shared_files(live.decode).isdisjoint(files), "swept at the next start"
    live.serves()


def test_a_daemon_that_is_back_before_it_was_missed(live: LiveCluster, daemon: DaemonProcess) -> None:
    """No silence is noticed in between: the new life itself ends the old one's rooms."""
    room = in_flight(live)
    survivor = other(live, daemon)
    if daemon is live.prefill:
        daemon.config = daemon.config | {"control": {"bind": live.control}}
    daemon.kill()
    restarted(live, daemon)
    told = http("GET", survivor, f"/v1/requests/{room}?wait=15").json()
    assert (told["state"], told["reason_code"]) == ("failed", "peer_failed")
    live.cross()
    live.serves()


def test_a_bootstrap_that_forgot_is_told_again(live: LiveCluster) -> None:
    bootstrap = live.cluster.bootstrap
    port = int(bootstrap.url.rpartition(":")[2])
    room = in_flight(live)
    bootstrap.kill()
    live.write(room, TOKENS, 500, TOKENS)
    live.sender.finish(room)
    live.read(room, TOKENS)
    live.reader.release(room)
    eventually("the loss shown", lambda: status(live.prefill)["bootstrap"]["problem"])
    assert http("GET", live.prefill, "/ready").status_code == 200, "rooms cross without it"
    live.serves()

    bootstrap.config = bootstrap.config | {"http": {"port": port}}
    bootstrap.start()
    eventually("the directory filled", lambda: not http("GET", bootstrap, "/ready").json()["reasons"])
    live.cross(TOKENS, live.ticket(TOKENS)["room"])
    eventually("no problem shown", lambda: not status(live.prefill)["bootstrap"]["problem"])
    live.serves()
