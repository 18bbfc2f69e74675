"""Daemon and engines as in different containers of a pod: other users and process namespaces, one group and /dev/shm in common."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvbridge.api.endpoint_file import DaemonEndpoint
from kvbridge.cli.local_cluster import LOG_JSON, DaemonProcess, daemon_config
from kvbridge.control.keys import generate_keys, write_keys
from kvbridge.control.unix_sockets import ENGINE_SOCKET, WORKER_SOCKET
from kvbridge.processes import ChildProcess, stop_all, wait_for
from tests.helpers.cluster import eventually
from tests.helpers.other_user import ROOT, as_user

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users"),
    pytest.mark.thorough,
]

DAEMON, ENGINE, STRANGER, SHARED = 20_001, 20_002, 20_003, 20_004
CONTAINER = ("--pid", "--fork", "--mount-proc")
TOKENS, START_S = 500, 60.0
DEVICE = {"full": 64, "swa": 16, "request": 8}


class OtherUser(ChildProcess):
    def __init__(self, role: str, folder: Path, bootstrap: str) -> None:
        super().__init__(role, folder / f"{role}.log")
        home = folder / role
        home.mkdir()
        os.chown(home, DAEMON, DAEMON)
        self.role = role
        self.runtime_dir = home / "run"
        pools: dict[str, Any] = {"device": DEVICE} | ({"host": {"pages": 64}} if role == "decode" else {})
        config = daemon_config(
            {"preset": "tiny-v4"},
            instance=f"{role}-0",
            runtime_dir=self.runtime_dir,
            transport="local",
            pools=pools,
            bootstrap={"url": bootstrap, "heartbeat_interval_s": 0.5},
            runtime_group=SHARED,
        )
        self.file = home / "config.yaml"
        self.file.write_text(json.dumps(config))

    def start(self) -> None:
        command = [sys.executable, "-m", "kvbridge", self.role, "--config", str(self.file)]
        self.launch([*as_user(DAEMON, (DAEMON, SHARED), namespaces=CONTAINER), *command], environment=SOURCES)

    def stop(self) -> int:
        if self.process is None:
            return 0
        signal_inside(self.process, signal.SIGTERM)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            signal_inside(self.process, signal.SIGKILL)
            return self.process.wait(10)

    def get(self, path: str) -> dict[str, Any]:
        file = self.runtime_dir / "daemon.json"
        endpoint = wait_for(f"{self.role} serves", file.exists, timeout_s=START_S, watched=[self]) and file.read_text()
        url = DaemonEndpoint.model_validate_json(endpoint).http_url
        return httpx.get(f"{url}{path}").json()


def signal_inside(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Signal the first process of a namespace; `process` is unshare, which only waits for it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), number)


@dataclass
class Pod:
    folder: Path
    bootstrap: DaemonProcess
    prefill: OtherUser
    decode: OtherUser

    def engine(self, role, room, *, user=ENGINE, groups=(ENGINE, SHARED), **more):
        daemon = self.prefill if role == "prefill" else self.decode
        job = {"role": role, "runtime_dir": str(daemon.runtime_dir), "daemon_user": DAEMON, "room": room}
        job |= {"tokens": TOKENS, "hold": False, **more}
        command = [sys.executable, "-m", "tests.helpers.other_user", json.dumps(job)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [*as_user(user, groups, namespaces=CONTAINER), *command]
        return subprocess.Popen(command, **pipes, cwd="/", env={**os.environ, **SOURCES})

    def room(self) -> int:
        answer = httpx.post(f"{self.bootstrap.url}/v1/requests", json={"prompt_tokens": TOKENS}, timeout=60)
        assert answer.is_success, answer.text
        return int(answer.json()["room"])

    def free(self, daemon: OtherUser) -> bool:
        return all(
            not count
            for space in daemon.get("/status")["pools"].values()
            for state, count in space.items()
            if state != "free"
        )


SOURCES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    folder.chmod(0o755)
    bootstrap = DaemonProcess("bootstrap", "bootstrap", folder / "b", {"http": {"port": 0}, **LOG_JSON})
    bootstrap.arguments = ("--endpoint-dir", str(bootstrap.runtime_dir))
    nodes: list[OtherUser] = []
    try:
        bootstrap.start()
        for role in ("prefill", "decode"):
            nodes.append(OtherUser(role, folder, bootstrap.url))
            nodes[-1].start()
        wait_for(
            "ready", lambda: all(node.get("/ready").get("ready") for node in nodes), timeout_s=START_S, watched=nodes
        )
        bootstrap.wait_ready()
        yield Pod(folder, bootstrap, *nodes)
    finally:
        codes = [node.stop() for node in nodes]
        stop_all([bootstrap], timeout_s=30)
        shutil.rmtree(folder)
    assert codes == [0, 0]


def ended(process: Any, timeout_s: float = 60.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def test_a_request_crosses_between_engines_that_are_other_users_than_their_daemons(pod: Pod):
    room = pod.room()
    sender, reader = pod.engine("prefill", room), pod.engine("decode", room)
    for process in (sender, reader):
        code, out, err = ended(process)
        assert (code, out) == (0, "done\n"), err
    for daemon in (pod.prefill, pod.decode):
        eventually(f"pages of {daemon.role} are free", lambda daemon=daemon: pod.free(daemon))


def test_pages_of_an_engine_in_another_process_namespace_are_free_after_its_end(pod: Pod):
    room = pod.room()
    sender, reader = pod.engine("prefill", room), pod.engine("decode", room, hold=True)
    assert ended(sender)[0] == 0
    assert reader.stdout.readline() == "held\n"
    assert not pod.free(pod.decode)
    signal_inside(reader, signal.SIGKILL)
    ended(reader)
    eventually("pages of a killed engine are free", lambda: pod.free(pod.decode))


def test_what_is_shared_is_shared_with_the_group_alone(pod: Pod):
    directory = pod.decode.runtime_dir
    found = {path.name: path.stat() for path in (directory, directory / ENGINE_SOCKET, directory / WORKER_SOCKET)}
    assert {name: (each.st_mode & 0o777, each.st_uid) for name, each in found.items()} == {
        "run": (0o750, DAEMON),
        ENGINE_SOCKET: (0o660, DAEMON),
        WORKER_SOCKET: (0o600, DAEMON),
    }
    assert found["run"].st_gid == found[ENGINE_SOCKET].st_gid == SHARED
    pools = [path.stat() for path in Path("/dev/shm").glob("kvbridge-*") if path.stat().st_uid == DAEMON]
    assert pools
    assert {(each.st_mode & 0o777, each.st_gid) for each in pools} == {(0o660, SHARED)}


@pytest.mark.parametrize(
    ("user", "groups", "more", "said"),
    [
        (STRANGER, (STRANGER,), {}, f"may not be entered by user {STRANGER}"),
        (ENGINE, (ENGINE, SHARED), {"daemon_user": None}, "is not a directory of this user"),
        (ENGINE, (ENGINE, SHARED), {"daemon_user": STRANGER}, f"is not a directory of user {STRANGER}"),
    ],
    ids=["not in the group", "was not told of the user", "was told of another user"],
)
def test_others_do_not_attach(pod: Pod, user: int, groups: tuple[int, ...], more: dict[str, Any], said: str):
    code, _, err = ended(pod.engine("decode", 1, user=user, groups=groups, **more))
    assert code == 1
    assert said in err.splitlines()[-1], err


@pytest.mark.parametrize(
    ("owner", "mode", "good"), [(0, 0o440, True), (0, 0o444, False), (STRANGER, 0o440, False), (DAEMON, 0o440, False)]
)
def test_a_secret_of_root_may_be_read_by_the_group_that_it_is_given_to(owner: int, mode: int, good: bool):
    program = (
        "import sys; from pathlib import Path\n"
        "from kvbridge.control.keys import load_keys\n"
        "print(load_keys(Path(sys.argv[1])).public)\n"
    )
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        public = write_keys(generate_keys(), folder / "node.key").read_text().strip()
        os.chown(folder / "node.key", owner, SHARED)
        (folder / "node.key").chmod(mode)
        command = [*as_user(DAEMON, (DAEMON, SHARED)), sys.executable, "-c", program, str(folder / "node.key")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd="/", env={**os.environ, **SOURCES}, check=False
        )
    finally:
        shutil.rmtree(folder)
    assert (done.stdout.strip() == public) is good, done.stderr
    assert good or f"has mode {mode & 0o777:04o}" in done.stderr or "run: chmod 600" in done.stderr
