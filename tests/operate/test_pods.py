"""The programs of the chart's pods run with their manifests' very arguments, variables, users and mounts."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.cluster import eventually
from tests.operate.pods import Pods, own_network, program
from tests.operate.test_chart import ROOT, of_kind, workloads

START_S = 120.0
ENGINE = """
import sys, time, kvbridge.engine
with getattr(kvbridge.engine, sys.argv[1]).attach(sys.argv[2], daemon_user=10001):
    time.sleep(600)
"""
PODS = ("kvbridge-prefill-0", "kvbridge-decode-0")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes mounts and processes of other users"),
]


@contextmanager
def release(case: str) -> Iterator[Pods]:
    """All pods of a release, one of each workload but for Redis, on 127.0.1.1 and so on."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home, own_network():
        folder = Path(home)
        folder.chmod(0o755)
        keys, programs = folder / "keys", folder / "programs"
        programs.mkdir(mode=0o755)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", str(ROOT / "docker/keys.sh"), str(keys), *PODS]
        subprocess.run(command, check=True, timeout=60, env={**os.environ, "PATH": path})
        stand_in = (sys.executable, "-m", "tests.operate.stand_in_engine")
        program(programs, "own-engine", sys.executable, "-c", ENGINE)
        program(programs, "vllm", *stand_in, "vllm")
        program(programs, "python3", *stand_in, "sglang")
        pods = Pods(keys, of_kind(case, "ConfigMap"), programs)
        try:
            started = []
            for each in sorted(workloads(case), key=lambda one: one["metadata"]["name"] != "kvbridge-redis"):
                name = each["metadata"]["name"]
                for number in range(3 if name == "kvbridge-redis" else 1):
                    started.append((each, number, f"127.0.1.{len(started) + 1}"))
                    pods.name(started[-1][2], name, f"{name}-{number}.{name}")
            for each in started:
                pods.start(*each)
            yield pods
        except BaseException:
            print(pods.logs())
            raise
        finally:
            pods.close()


def ask(pods: Pods, pod: str, port: int, path: str, *, token: str, **more: Any) -> httpx.Response | None:
    shown = (pods._secret / token).read_text().strip()
    try:
        return httpx.request(
            more.pop("method", "GET"),
            f"http://{pods.addresses[pod]}:{port}{path}",
            headers={"Authorization": f"Bearer {shown}"},
            timeout=30,
            **more,
        )
    except httpx.HTTPError:
        return None


def wait(pods: Pods, what: str, look: Any) -> Any:
    def watched() -> Any:
        for process in pods.running.values():
            process.check_running()
        return look()

    return eventually(what, watched, START_S)


@pytest.mark.parametrize("case", ["vllm", pytest.param("sglang-tcp", marks=pytest.mark.thorough)])
def test_a_router_finds_the_servers_by_bootstrap_and_calls_them_well(case: str) -> None:
    with release(case) as pods:

        def ready() -> bool:
            answer = ask(pods, "kvbridge-router-0", 7903, "/ready", token="router.token")
            return answer is not None and answer.status_code == 200

        wait(pods, "the router is ready", ready)
        status = ask(pods, "kvbridge-router-0", 7903, "/status", token="router.token").json()
        assert {one["url"] for one in status["servers"]} == {f"http://{pods.addresses[pod]}:8000" for pod in PODS}
        assert ask(pods, "kvbridge-router-0", 7903, "/status", token="nodes.token").status_code == 401
        for pod, port in zip(PODS, (7901, 7902), strict=True):
            answer = ask(pods, pod, port, "/status", token="nodes.token")
            assert answer.json()["instance"] == pod


@pytest.mark.thorough
def test_own_engines_have_their_daemon_and_bootstrap_outlives_the_redis_that_takes_writes() -> None:
    with release("own") as pods:

        def ticket() -> dict[str, Any] | None:
            told = {"prompt_tokens": 1000, "max_new_tokens": 16}
            shown = {"token": "bootstrap.token", "method": "POST", "json": told}
            answer = ask(pods, "kvbridge-bootstrap-0", 7900, "/v1/requests", **shown)
            return answer.json() if answer is not None and answer.is_success else None

        found = wait(pods, "a pair", ticket)
        assert (found["prefill"]["instance"], found["decode"]["instance"]) == PODS
        for pod, port in zip(PODS, (7901, 7902), strict=True):
            wait(pods, "its engine", lambda: ask(pods, pod, port, "/status", token="nodes.token").json()["engines"])  # noqa: B023
        pods.kill("kvbridge-redis-0")
        for key in [key for key in pods.running if key[0] == "kvbridge-redis-0"]:
            del pods.running[key]
        wait(pods, "a pair by another Redis", ticket)
