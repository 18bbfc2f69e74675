"""deploy/helm/kvbridge, rendered by Helm's own library: objects by the schemas of Kubernetes, settings by our loader.

Schemas of custom resources (ServiceMonitor, PrometheusRule) are not published in a package. No cluster was asked.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from kvbridge import __version__
from kvbridge.config.limits import BootstrapTimeouts, DaemonTimeouts
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig, RouterConfig, RouterTimeouts
from kvbridge.core.ids import Role
from kvbridge.engine.kit.node import node_config
from kvbridge.engine.sglang import SETTINGS_FILE, SGLANG
from kvbridge.engine.sglang.instance import read_settings
from kvbridge.engine.vllm import VLLM
from tests.operate.stand_in_engine import plan

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm" / "kvbridge"
CASES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "charts.yaml").read_text())
RELEASE = "kvbridge"
KUBERNETES = "1.34"
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
SCHEMAS = {"bootstrap": BootstrapConfig, "router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
POD_IP = "10.0.0.7"

each_case = pytest.mark.parametrize("case", CASES)


@cache
def chart() -> helm.Chart:
    return helm.Chart.load(FOLDER)


def render(values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The objects of a release, and what Helm says after its installation."""
    chart().validate_schema(dict(values))
    files = chart().render(dict(values), name=RELEASE, namespace="llm")
    notes = files.pop("kvbridge/templates/NOTES.txt")
    return [each for text in files.values() for each in yaml.safe_load_all(text) if each], notes


@cache
def rendered(case: str) -> list[dict[str, Any]]:
    return render(CASES[case])[0]


def of_kind(case: str, *kinds: str) -> list[dict[str, Any]]:
    return [each for each in rendered(case) if each["kind"] in kinds]


def workloads(case: str) -> list[dict[str, Any]]:
    return of_kind(case, "Deployment", "StatefulSet")


def component(each: dict[str, Any]) -> str:
    return each["metadata"]["labels"]["app.kubernetes.io/component"]


def containers(case: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each component, the specification of its pod, and one of its containers."""
    for each in workloads(case):
        spec = each["spec"]["template"]["spec"]
        for container in spec["containers"]:
            yield component(each), spec, container


def environment(container: dict[str, Any], pod: str, *, pod_ip: str = POD_IP) -> dict[str, str]:
    """A container's variables in the pod of that name, as the kubelet makes them; secrets are left out."""
    fields = {"metadata.name": pod, "status.podIP": pod_ip}
    values: dict[str, str] = {}
    for entry in container.get("env", ()):
        if "value" in entry:
            values[entry["name"]] = expanded(entry["value"], values)
        elif "fieldRef" in entry["valueFrom"]:
            values[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return values


def expanded(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), text)


def settings_of(container: dict[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a node that an engine starts."""
    for argument in container["args"]:
        if argument.startswith("--kv-transfer-config="):
            told = json.loads(expanded(argument.partition("=")[2], values))
            assert told["kv_connector"] == "KvbridgeConnector"
            return dict(told["kv_connector_extra_config"])
    return read_settings(values[SETTINGS_FILE])


def configurations(case: str) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Each component that is a program of ours, its configuration, its pod and its container."""
    for name, spec, container in containers(case):
        values = environment(container, f"{RELEASE}-{name}-0")
        if container["name"] == "engine" and CASES[case]["engine"] != "own":
            product = VLLM if CASES[case]["engine"] == "vllm" else SGLANG
            yield name, node_config(plan(Role(name), settings_of(container, values), product))[0], spec, container
        elif container["name"] in {"daemon", "bootstrap", "router"}:
            role, *options = container["args"]
            assert role == name
            given = dict(option.removeprefix("--").split("=", 1) for option in options)
            keys = {"host": "http.host", "bootstrap": "bootstrap.url", "token-file": "http.token_file"}
            settings = {key: value for key, value in values.items() if key.startswith("KVBRIDGE_")}
            flags = {keys[key]: value for key, value in given.items()}
            yield name, load_config(SCHEMAS[name], environment=settings, flags=flags), spec, container


@each_case
def test_every_object_fits_its_schema(case: str):
    kinds = set()
    for each in rendered(case):
        if each["kind"] not in CUSTOM:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        kinds.add(each["kind"])
        assert "namespace" not in each["metadata"], "it is the release's"
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget"} <= kinds
    assert "Secret" not in kinds
    assert kinds >= CUSTOM or case != "sglang"


def test_helm_finds_nothing_wrong_and_the_chart_has_the_version_of_the_package():
    logging.disable(logging.NOTSET)
    for values in CASES.values():
        found = helm.lint(FOLDER, values, strict=True)
        assert not found["errors"], found
    assert chart().metadata["version"] == chart().metadata["appVersion"] == __version__


@each_case
def test_every_program_has_a_right_configuration_and_keys_that_the_notes_make(case: str):
    names = re.search(r"docker/keys.sh keys (\S+) (\S+)$", render(CASES[case])[1], re.MULTILINE)
    roles = {"bootstrap", "prefill", "decode"} | ({"router"} if CASES[case]["engine"] != "own" else set())
    found = {}
    for name, config, spec, container in configurations(case):
        found[name] = config
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["node"] == config.http.port
        assert {"name": "keys", "mountPath": "/keys", "readOnly": True} in container["volumeMounts"]
        limits = {"bootstrap": BootstrapTimeouts().shutdown_s, "router": RouterTimeouts().shutdown_s}
        node = DaemonTimeouts()
        drain_s = limits.get(name, node.shutdown_rooms_s + node.shutdown_close_s)
        assert spec["terminationGracePeriodSeconds"] > drain_s
        if isinstance(config, PrefillConfig | DecodeConfig):
            assert config.instance == f"{RELEASE}-{name}-0"
            assert config.instance in names[1 if name == "prefill" else 2].split(",")
            assert config.http.advertise_url == f"http://{POD_IP}:{config.http.port}"
            assert config.engine_url == (f"http://{POD_IP}:{ports['http']}" if "http" in ports else "")
            network = CASES[case].get("dataNetwork", {}).get("interface", POD_IP)
            assert config.transports.mooncake.host == network
        if isinstance(config, PrefillConfig):
            assert config.control.advertise == f"tcp://{POD_IP}:{ports['control']}"
    assert found.keys() == roles
    services = {each["metadata"]["name"]: each for each in of_kind(case, "Service")}
    for config in found.values():
        if not isinstance(config, BootstrapConfig):
            host, port = config.bootstrap.url.removeprefix("http://").split(":")
            assert int(port) == services[host]["spec"]["ports"][0]["port"] == found["bootstrap"].http.port


@each_case
def test_what_selects_pods_finds_them_and_their_ports(case: str):
    pods = [
        (
            each["spec"]["template"]["metadata"]["labels"],
            {
                port["name"]: port["containerPort"]
                for one in each["spec"]["template"]["spec"]["containers"]
                for port in one.get("ports", ())
            },
        )
        for each in workloads(case)
    ]

    def selected(selector: Mapping[str, str]) -> dict[str, int]:
        found = [ports for labels, ports in pods if selector.items() <= labels.items()]
        assert len(found) == 1, selector
        return found[0]

    budgets = {component(each) for each in of_kind(case, "PodDisruptionBudget")}
    assert budgets == {component(each) for each in workloads(case)}
    for each in rendered(case):
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= selected(spec["selector"]).keys()
        elif each["kind"] in {"PodDisruptionBudget", "Deployment", "StatefulSet"}:
            selected(spec["selector"]["matchLabels"])
        elif each["kind"] == "NetworkPolicy" and component(each) in budgets:
            ports = selected(spec["podSelector"]["matchLabels"])
            assert {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())} <= ports.keys()
            peers = [peer for rule in spec["ingress"] for peer in rule.get("from", ())]
            rules = [peer["podSelector"] for peer in peers if "podSelector" in peer]
            assert all(set(rule["matchLabels"]) <= set(pods[0][0]) for rule in rules)
        elif each["kind"] == "ServiceMonitor":
            service = next(
                one
                for one in of_kind(case, "Service")
                if spec["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
            )
            ports = {port["name"] for port in service["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in spec["endpoints"]} <= ports
            assert each["metadata"]["labels"]["release"] == "watch"


@each_case
def test_containers_are_probed_and_have_no_right_that_they_do_not_need(case: str):
    for name, spec, container in containers(case):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        if context.get("runAsUser") == 0:  # to keep IPC_LOCK; locking-memory.sh leaves the rest
            assert CASES[case]["transports"]["protocol"] == "rdma"
            assert container["command"][0] == "locking-memory.sh"
            assert context["capabilities"]["add"] == ["IPC_LOCK", "SETUID", "SETGID", "SETPCAP"]
        else:
            assert "add" not in context["capabilities"]
        if not (name in set(Role) and container["name"] == "engine" and CASES[case]["engine"] == "own"):
            assert {"livenessProbe", "readinessProbe"} <= container.keys()
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in spec["volumes"]}


@each_case
def test_engines_can_be_pinned_and_see_their_devices(case: str):
    values = CASES[case]
    for name, spec, container in containers(case):
        if name not in set(Role):
            continue
        limits = container["resources"]["limits"]
        assert isinstance(limits["cpu"], int), "the kubelet pins whole processors only"
        assert "requests" not in container["resources"], "they are the limits: the pod is Guaranteed"
        gpus = values.get(name, {}).get("gpus", 1)
        if values["engine"] != "own":
            assert limits["nvidia.com/gpu"] == gpus
        elif gpus:
            assert container["resources"]["claims"] == [{"name": "gpus"}]
        if container["name"] == "daemon" and name == "decode" and values.get("own"):
            assert limits["hugepages-1Gi"] == "64Gi"
            config = next(config for role, config, _, _ in configurations(case) if role == name)
            assert {"name": "hugepages", "mountPath": str(config.pools.host.directory)} in container["volumeMounts"]
        card = values.get("transports", {}).get("resource")
        assert card is None or limits[card] == 1
        if values["engine"] == "own":
            shared = {"/run/kvbridge", "/dev/shm", *(["/hugepages"] if name == "decode" and values.get("own") else ())}
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert shared <= mounts
            assert spec["shareProcessNamespace"] is True
            assert ("/keys" in mounts) == (container["name"] == "daemon"), "an engine has no keys"


def test_a_second_network_a_class_and_rules_are_where_they_are_asked_for():
    case = "sglang"
    for each in workloads(case):
        template = each["spec"]["template"]
        networks = template["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/networks")
        assert networks == ("fabrics/storage@lo" if component(each) in set(Role) else None)
        assert template["spec"]["priorityClassName"] == of_kind(case, "PriorityClass")[0]["metadata"]["name"]
        assert (
            all("@sha256:" in one["image"] for one in template["spec"]["containers"] if one["name"] != "redis")
            or component(each) == "redis"
        )
    (rules,) = of_kind(case, "PrometheusRule")
    alerts_text = (ROOT / "deploy/prometheus/alerts.yaml").read_text()
    alerts = yaml.safe_load(alerts_text.replace("docs/runbook.md", "https://docs.example/runbook/"))
    recorded = yaml.safe_load((ROOT / "deploy/prometheus/recording.yaml").read_text())
    assert rules["spec"]["groups"] == [*recorded["groups"], *alerts["groups"]]
    endpoints = [each["spec"]["endpoints"][0] for each in of_kind(case, "ServiceMonitor")]
    assert len(endpoints) == 4
    assert {one["replacement"] for each in endpoints for one in each["relabelings"]} == {"kvbridge"}, "the rules' jobs"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": "trt"}, "engine"),
        ({"model": {"name": ""}}, "name"),
        ({"engineImage": {"repository": ""}}, "repository"),
        ({"prefil": {"replicas": 2}}, "prefil"),
        ({"prefill": {"replicas": 0}}, "replicas"),
        ({"decode": {"resources": {"cpu": "500m", "memory": "8Gi"}}}, "cpu"),
        ({"transports": {"order": ["local"]}}, "order"),
        ({"engine": "own"}, "node"),
        ({"own": {"hugePages": {"amount": "64Gi"}}}, "amount"),
        ({"priorityClass": {"create": True}}, "priorityClass"),
        ({"monitoring": {"rules": {"enabled": True}}}, "runbook"),
        ({"bootstrap": {"redis": {"url": "redis://user:hush@host"}}}, "url"),
        ({"bootstrap": {"replicas": 2}}, "redis"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(change: dict[str, Any], said: str):
    with pytest.raises(helm.HelmError, match=said):
        render({**CASES["vllm"], **change})
