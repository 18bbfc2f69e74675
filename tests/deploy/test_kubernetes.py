"""deploy/kubernetes, rendered by kustomize and checked against the published schemas of Kubernetes.

Those of custom resources are not published in a package: of these only the pods are checked. No cluster was asked.
"""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvbridge.config.limits import BootstrapTimeouts, DaemonTimeouts
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("one-host", "replicated-bootstrap", "rdma")
KUBERNETES = "1.34"
CUSTOM = {"ServiceMonitor", "LeaderWorkerSet"}
SCHEMAS = {"bootstrap": BootstrapConfig, "prefill": PrefillConfig, "decode": DecodeConfig}


@cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    return built(FOLDER / "overlays" / overlay)


def built(folder: Path) -> list[dict[str, Any]]:
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("neither kustomize nor a kubectl that carries one is here, and Debian packages no version 5")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pod_of(each: dict[str, Any]) -> dict[str, Any] | None:
    spec = each.get("spec", {})
    return spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("workerTemplate")


def daemons(overlay: str) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Each object that runs daemons, its pod and the daemon's container."""
    return [
        (each, pod, container)
        for each in rendered(overlay)
        if (pod := pod_of(each)) is not None
        for container in pod["spec"]["containers"]
        if container["image"].startswith("kvbridge:")
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_fits_its_schema(overlay: str):
    checked = 0
    for each in rendered(overlay):
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        if (pod := pod_of(each)) is not None:
            as_pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "any", **pod.get("metadata", {})},
                "spec": pod["spec"],
            }
            kubernetes_validate.validate(as_pod, KUBERNETES, strict=True)
            checked += 1
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "kvbridge", each["metadata"]
    assert checked >= 3


def environment(container: dict[str, Any], pod_name: str) -> dict[str, str]:
    """Return a container's variables, for the pod of that name."""
    values: dict[str, str] = {}
    for entry in container.get("env", ()):
        if "value" in entry:
            values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], entry["value"])
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            known = {"status.podIP": "10.0.0.7", "metadata.name": pod_name}
            values[entry["name"]] = (
                known.get(path) or {"group-index": "1", "worker-index": "1"}[path.split("/")[1].rstrip("']")]
            )
    return values


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_daemon_has_a_right_configuration_and_keys_that_exist(overlay: str, tmp_path: Path):
    files = next(each["data"] for each in rendered(overlay) if each["kind"] == "ConfigMap")
    roles = set()
    for each, _, container in daemons(overlay):
        variables = environment(container, f"{each['metadata']['name']}-1")
        role, _, file = (re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in container["args"])  # noqa: B023
        (tmp_path / "config.yaml").write_text(files[Path(file).name])
        settings = {name: value for name, value in variables.items() if name.startswith("KVBRIDGE_")}
        config = load_config(SCHEMAS[role], file=tmp_path / "config.yaml", environment=settings)
        roles.add(role)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["http"] == config.http.port
        if isinstance(config, BootstrapConfig):
            continue
        assert config.instance == f"{role}-1"  # docker/keys.sh is told these names
        assert config.control.curve.secret_key_file == Path(f"/keys/{role}-1.key")
        assert config.http.advertise_url == f"http://10.0.0.7:{config.http.port}"
        assert config.bootstrap.url == "http://bootstrap:7900"
        if isinstance(config, PrefillConfig):
            assert config.control.bind == f"tcp://0.0.0.0:{ports['control']}"
            assert config.control.advertise == f"tcp://10.0.0.7:{ports['control']}"
    assert roles == set(SCHEMAS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_probed_and_have_the_time_to_drain(overlay: str):
    node, bootstrap = DaemonTimeouts(), BootstrapTimeouts()
    for each, pod, container in daemons(overlay):
        assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
        needed_s = (
            bootstrap.shutdown_s
            if each["metadata"]["name"] == "bootstrap"
            else node.shutdown_rooms_s + node.shutdown_close_s
        )
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed_s


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_have_no_right_that_they_do_not_need(overlay: str):
    for each in rendered(overlay):
        pod = pod_of(each)
        for container in pod["spec"]["containers"] if pod else ():
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            if context.get("runAsUser") == 0:  # to keep IPC_LOCK; locking-memory.sh leaves the rest
                assert container["command"] == ["locking-memory.sh", "kvbridge"]
                assert context["capabilities"]["add"] == ["IPC_LOCK", "SETUID", "SETGID", "SETPCAP"]
            else:
                assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
                assert "add" not in context["capabilities"]
            assert pod["spec"]["automountServiceAccountToken"] is False
            assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_selects_pods_finds_them(overlay: str):
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"] for each in rendered(overlay) if (pod := pod_of(each))
    }
    kinds: dict[str, set[str]] = {}
    for each in rendered(overlay):
        selector = each.get("spec", {}).get("selector") or each.get("spec", {}).get("podSelector") or {}
        wanted = selector.get("matchLabels", selector).get("app.kubernetes.io/component")
        if wanted:
            assert wanted in pods, (each["kind"], each["metadata"]["name"])
            kinds.setdefault(each["kind"], set()).add(wanted)
    for kind in ("PodDisruptionBudget", "Service"):
        assert {"bootstrap", "prefill", "decode"} <= kinds[kind]


def test_daemon_and_engine_of_a_pod_share_memory_directory_group_and_gpus():
    for _, pod, daemon in daemons("rdma"):
        engine = next((each for each in pod["spec"]["containers"] if each["name"] == "engine"), None)
        if engine is None:  # bootstrap
            continue
        group = str(pod["spec"]["securityContext"]["fsGroup"])
        assert {"name": "KVBRIDGE_RUNTIME_GROUP", "value": group} in daemon["env"]
        assert pod["spec"]["shareProcessNamespace"] is True
        mounts = {each["name"]: each["mountPath"] for each in engine["volumeMounts"]}
        assert mounts == {"run": "/run/kvbridge", "shm": "/dev/shm"}  # and no keys
        assert mounts.items() <= {each["name"]: each["mountPath"] for each in daemon["volumeMounts"]}.items()
        memory = {each["name"]: each["emptyDir"] for each in pod["spec"]["volumes"] if "emptyDir" in each}
        assert memory["shm"]["medium"] == "Memory"
        assert engine["resources"]["claims"] == daemon["resources"]["claims"]
        assert engine["securityContext"]["runAsUser"] not in (0, 10001)


def test_no_secret_is_in_the_manifests():
    assert not [each for overlay in OVERLAYS for each in rendered(overlay) if each["kind"] == "Secret"]


@pytest.mark.parametrize("overlay", ["one-host", "rdma"])
def test_every_image_can_be_named_by_its_digest(tmp_path: Path, overlay: str):
    """A kustomization over an overlay, as operating.md has it."""
    copy = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copy)
    digest = "sha256:" + 64 * "0"
    names = {
        container["image"].partition(":")[0]
        for each in rendered(overlay)
        if (pod := pod_of(each)) is not None
        for container in pod["spec"]["containers"]
    }
    mine = tmp_path / "mine"
    mine.mkdir()
    images = [{"name": name, "digest": digest} for name in sorted(names)]
    settings: dict[str, Any] = {"resources": [f"../kubernetes/overlays/{overlay}"], "images": images}
    if overlay == "rdma":  # kustomize has to be told where images are in a LeaderWorkerSet
        shutil.copy(FOLDER / "overlays/rdma/kustomizeconfig.yaml", mine)
        settings["configurations"] = ["kustomizeconfig.yaml"]
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(settings))
    found = [
        container["image"]
        for each in built(mine)
        if (pod := pod_of(each)) is not None
        for container in pod["spec"]["containers"]
    ]
    assert found
    assert all(image.endswith(f"@{digest}") for image in found), found
