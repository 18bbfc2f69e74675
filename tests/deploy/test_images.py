"""docker/: what the steps of an image do, done here without a container engine, and a fleet of what they make.

Not tested, since only a container engine could show it: layers, the base images, Compose's own networks and volumes.
"""

import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

from kvbridge.api.endpoint_file import DaemonEndpoint
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.processes import ChildProcess, child_environment, stop_all, wait_for
from tests.helpers.other_user import as_user

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SCHEMAS = {"bootstrap": BootstrapConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
DAEMONS = [name for name, service in COMPOSE["services"].items() if service.get("command", [""])[0] in SCHEMAS]
USER = 10001
START_S = 60.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files and processes of another user")


def step(*arguments: str | Path) -> str:
    command = ["bash", str(DOCKER / "build.sh"), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=child_environment(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def locked(target: str) -> dict[str, str]:
    """The version of each package of a lock file, all of which have hashes."""
    entries = re.split(r"\n(?=[A-Za-z])", (DOCKER / f"{target}.lock").read_text().partition("\n\n")[0])
    found = {}
    for entry in entries:
        if not entry.startswith("#"):
            assert "--hash=sha256:" in entry, entry
            name, version = re.match(r"([A-Za-z0-9._-]+)==([^\s\\]+)", entry).groups()
            found[name.lower()] = version
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_lock_has_what_the_package_asks_for(target: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        Requirement(each) for each in (*project["dependencies"], *extras[target], *extras["redis"], *extras["traces"])
    ]
    found = locked(target)
    wrong = [str(each) for each in asked if each.name not in found or not each.specifier.contains(found[each.name])]
    assert not wrong, "run docker/lock.sh"


def test_the_image_is_made_by_the_steps_that_are_tested_here():
    steps = set(re.findall(r"^RUN bash /src/docker/build.sh (\w+)", DOCKERFILE, re.MULTILINE))
    assert steps == {"system", "packages", "kvbridge", "user"}
    assert len(re.findall(r"^RUN", DOCKERFILE, re.MULTILINE)) == len(
        re.findall(r"^RUN bash /src/docker/build.sh", DOCKERFILE, re.MULTILINE)
    )
    for source in re.findall(r"^COPY (docker/.*) /\S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).is_file() for name in source.split()), source
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == [f"{USER}:{USER}"]


def test_every_daemon_of_the_fleet_has_a_right_configuration():
    assert DAEMONS == ["bootstrap", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    instances = set()
    for name in DAEMONS:
        role, _, file = COMPOSE["services"][name]["command"]
        assert file == f"/etc/kvbridge/{role}.yaml"
        environment = COMPOSE["services"][name].get("environment", {})
        config = load_config(SCHEMAS[role], file=DOCKER / "compose" / f"{role}.yaml", environment=environment)
        if role != "bootstrap":
            instances.add(config.instance)
            assert config.instance == name
            assert config.http.advertise_url == f"http://{name}:{config.http.port}"
            assert config.control.curve.secret_key_file == Path(f"/var/lib/kvbridge/keys/{name}.key")
    assert instances == set(DAEMONS[1:])


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    step("system")
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    try:
        folder.chmod(0o755)
        environment = folder / "kvbridge"
        step("packages", "cpu", environment)
        step("kvbridge", environment)
        step("check", "cpu", environment)
        (folder / "work").mkdir(mode=0o700)
        os.chown(folder / "work", USER, USER)
        yield folder
    finally:
        shutil.rmtree(folder)


class Contained(ChildProcess):
    def __init__(self, name: str, image: Path, overrides: dict[str, str]) -> None:
        super().__init__(name, image / f"{name}.log")
        service = COMPOSE["services"][name]
        role = service["command"][0]
        self.runtime_dir = image / "work" / name
        arguments = [role, "--config", str(image / "compose" / f"{role}.yaml")]
        arguments += ["--endpoint-dir", str(self.runtime_dir)] if role == "bootstrap" else []
        environment = service.get("environment", {})
        overrides = {"http.port": "0", "http.advertise_url": "http://127.0.0.1:0", **overrides}
        if role == "prefill":
            overrides |= {"control.bind": "tcp://0.0.0.0:0", "control.advertise": "tcp://127.0.0.1:0"}
        if role != "bootstrap":
            overrides |= {
                "runtime_dir": str(self.runtime_dir),
                "bootstrap.token_file": str(image / "work/keys/bootstrap.token"),
                "control.curve.secret_key_file": str(image / f"work/keys/{name}.key"),
                "transports.nixl.ucx_net_devices": "lo",
            }
        self.environment = dict(environment)
        self.command = [*as_user(USER), str(image / "kvbridge/bin/kvbridge"), *arguments]
        for key, value in overrides.items():
            self.command += ["--set", f"{key}={value}"]

    def start(self) -> None:
        self.launch(self.command, environment=self.environment)

    @property
    def url(self) -> str:
        def look() -> DaemonEndpoint | None:
            file = self.runtime_dir / "daemon.json"
            return DaemonEndpoint.model_validate_json(file.read_text()) if file.exists() else None

        return wait_for(f"endpoint of {self.name}", look, timeout_s=START_S, watched=[self]).http_url


@pytest.mark.thorough
@as_root
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fleet_of_the_image_pairs_as_a_user_without_rights(image: Path):
    keys = image / "work" / "keys"
    path = {**child_environment(os.environ), "PATH": f"{image / 'kvbridge/bin'}:{os.environ['PATH']}"}
    make = [*as_user(USER), "bash", str(DOCKER / "keys.sh"), str(keys), "prefill-0,prefill-1", "decode-0,decode-1"]
    assert COMPOSE["services"]["keys"]["entrypoint"] == ["keys.sh", "/var/lib/kvbridge/keys", *make[-2:]]
    readable = image / "keys.sh"
    shutil.copy(DOCKER / "keys.sh", readable)
    shutil.copytree(DOCKER / "compose", image / "compose")
    make[make.index(str(DOCKER / "keys.sh"))] = str(readable)
    subprocess.run(make, env=path, timeout=60, check=True)

    nodes_token, bootstrap_token = (
        (keys / "nodes.token").read_text().strip(),
        (keys / "bootstrap.token").read_text().strip(),
    )
    bootstrap = Contained(
        "bootstrap",
        image,
        {"http.token_file": str(keys / "bootstrap.token"), "daemons.token_file": str(keys / "nodes.token")},
    )
    fleet: list[Contained] = [bootstrap]
    try:
        bootstrap.start()
        link = {"bootstrap.url": bootstrap.url, "http.token_file": str(keys / "nodes.token")}
        for name in DAEMONS[1:]:
            more = {"control.curve.allowed_keys_file": str(keys / "allowed.keys")} if name.startswith("prefill") else {}
            fleet.append(Contained(name, image, link | more))
            fleet[-1].start()

        def ask(method: str, url: str, token: str, **more: Any) -> Any:
            return httpx.request(method, url, headers={"Authorization": f"Bearer {token}"}, timeout=60, **more)

        def ready() -> bool:
            return all(ask("GET", f"{each.url}/ready", nodes_token).status_code == 200 for each in fleet[1:])

        wait_for("the fleet is ready", ready, timeout_s=START_S, watched=fleet)
        answer = wait_for(
            "a pair",
            lambda: (
                (
                    got := ask("POST", f"{bootstrap.url}/v1/requests", bootstrap_token, json={"prompt_tokens": 100})
                ).is_success
                and got
            ),
            timeout_s=START_S,
            watched=fleet,
        )
        room = answer.json()["room"]
        assert ask("DELETE", f"{bootstrap.url}/v1/requests/{room}", bootstrap_token).is_success
    except BaseException:
        print("\n".join(f"--- {each.name}\n{each.log(20)}" for each in fleet))
        raise
    finally:
        stop_all(fleet, timeout_s=30)
    assert [each.process.returncode for each in fleet] == [0] * 5


@as_root
def test_memory_can_be_locked_by_no_root_where_the_container_may():
    program = (
        "import ctypes, mmap, os, resource\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "memory = mmap.mmap(-1, 1 << 22)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "print(os.getuid(), ctypes.CDLL(None).mlock(ctypes.c_void_p(address), len(memory)))\n"
    )
    python = "/usr/bin/python3"

    def said(*before: str) -> str:
        command = [*before, python, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd="/").stdout.strip()

    assert said(*as_user(USER)) == f"{USER} -1"
    assert said("bash", str(DOCKER / "locking-memory.sh")) == f"{USER} 0"
