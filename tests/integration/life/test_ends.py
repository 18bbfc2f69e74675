"""How daemons end: signals, what they leave in shared memory, and starts that cannot be."""

import json
import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typer.testing import CliRunner

from kvbridge.cli.main import app
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, all_free, http
from tests.integration.life.conftest import (
    ONE_SIDE,
    SHUTDOWN_ROOMS_S,
    TOKENS,
    exit_code,
    gone,
    in_flight,
    other,
    pid,
    restarted,
    shared_files,
    worker_pid,
)


def listed(live: LiveCluster) -> list[str]:
    return [each["instance"] for each in http("GET", live.cluster.bootstrap, "/v1/instances").json()]


def test_sigterm_lets_rooms_end(live: LiveCluster, daemon: DaemonProcess) -> None:
    """The signal goes to the group of processes, as from a shell (`kill %1`)."""
    room = in_flight(live)
    workers = worker_pid(daemon)
    earlier = len(daemon.log_path.read_text())
    os.killpg(pid(daemon), signal.SIGTERM)
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
    live.begun[room].finish()
    live.read(room, TOKENS)
    live.claimed[room].release()
    assert exit_code(daemon) == 0
    said = [json.loads(line) for line in daemon.log_path.read_text()[earlier:].splitlines()]
    # On a slow machine a message may come twice before it is acknowledged.
    assert not [one for one in said if one["level"] not in {"debug", "info"} and one.get("kind") != "duplicate"], said
    assert [each["limit_s"] for each in said if each["event"] == "draining"] == [SHUTDOWN_ROOMS_S]
    assert instance not in listed(live)
    assert gone(workers)
    assert not shared_files(daemon)
    assert not list(daemon.runtime_dir.glob("*.json")), "a closed endpoint is not announced"
    all_free(other(live, daemon))
    restarted(live, daemon)
    live.serves()


@ONE_SIDE
def test_rooms_that_do_not_end_are_aborted_at_the_limit(live: LiveCluster, daemon: DaemonProcess) -> None:
    room = in_flight(live)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(http, "GET", daemon, f"/v1/requests/{room}?wait=15")
        began_s = time.monotonic()
        daemon.kill(signal.SIGTERM)
        final = asked.result(20).json()
        assert exit_code(daemon) == 0
    assert time.monotonic() - began_s > SHUTDOWN_ROOMS_S
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


@ONE_SIDE
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


def test_whoever_starts_sweeps_what_the_dead_have_left(live: LiveCluster) -> None:
    """The dead are of another instance, with another runtime directory: pools of the node, proofs of its workers."""
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
        # The last worker ends a moment after its node.
        eventually("they are named", lambda: all(name in clean(folder, "--dry-run") for name in left))
        eventually("a clean folder", lambda: clean(folder) and not set(folder.iterdir()))
    finally:
        first.kill()
        second.kill()
        shutil.rmtree(folder)


def alone(live: LiveCluster, name: str = "alone", **more: object) -> DaemonProcess:
    """A decode daemon outside of the directory."""
    daemon = DaemonProcess("decode", name, live.cluster.folder / name)
    daemon.config = live.decode.config | {
        "instance": f"{name}-{os.getpid()}",
        "runtime_dir": str(daemon.runtime_dir),
        "bootstrap": {"url": ""},
        **more,
    }
    return daemon


def clean(folder: Path, *options: str) -> str:
    told = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["clean", "--directory", str(folder), *options])
    assert told.exit_code == 0, told.output
    return told.output


def test_what_is_taken_is_named_and_ends_the_start(live: LiveCluster) -> None:
    """The daemons start all at once, since most of the time goes into importing."""
    http_port = live.prefill.url.rpartition(":")[2]
    control_port = live.control.rpartition(":")[2]
    missing = live.cluster.folder / "no-such-file.json"
    wrong = [("decode", {"pools": {"device": {"full": 8}, "host": {"pages": 8}}}, "pools.device.request")]
    unavailable = [
        ("prefill", {"http": {"port": int(http_port)}}, f"http.port {http_port}"),
        ("bootstrap", {"http": {"port": int(http_port)}}, f"http.port {http_port}"),
        ("prefill", {"control": {"bind": f"tcp://127.0.0.1:{control_port}"}}, f"127.0.0.1:{control_port} is taken by"),
        ("prefill", {"runtime_dir": str(live.prefill.runtime_dir)}, str(live.prefill.runtime_dir)),
        ("prefill", {"runtime_dir": str(live.decode.runtime_dir)}, "another process serves"),
        ("decode", {"model": {"hf_config": str(missing)}}, str(missing)),
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
            *_, last = map(json.loads, refused.log().splitlines())
            assert last["event"] == "daemon_failed", last
            assert text in last["reason"], last
    finally:
        for refused, *_ in started:
            refused.kill()
    assert live.prefill.endpoint().pid == pid(live.prefill), "the endpoint file is still its owner's"
    live.serves()


def decode_pools(directory: str) -> dict[str, object]:
    return {"device": {"full": 8, "swa": 4, "request": 2}, "host": {"pages": 8, "directory": directory}}
