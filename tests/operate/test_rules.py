"""Alerts, recording rules and boards: promtool accepts them, every name in them exists, and each alert fires in its situation."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.build import BOARDS, write
from deploy.grafana.panels import ANNOTATIONS, INSTANCE, ROLE, Board
from kvbridge.telemetry.metrics import METRICS
from tests.docs.pages import ROOT, spans

FOLDER = ROOT / "deploy" / "prometheus"
RULE_FILES = (FOLDER / "recording.yaml", FOLDER / "alerts.yaml")
GROUPS = [group for file in RULE_FILES for group in yaml.safe_load(file.read_text())["groups"]]
RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RUNBOOK = ROOT / "docs" / "runbook.md"
SITUATIONS = yaml.safe_load((Path(__file__).parent / "situations.yaml").read_text())
STEP_S = 15
DAEMONS = {
    "PREFILL": {"job": "kvbridge", "instance": "p:7901", "daemon": "prefill-0/node-0"},
    "DECODE": {"job": "kvbridge", "instance": "d:7902", "daemon": "decode-0/node-0"},
    "BOOTSTRAP": {"job": "kvbridge", "instance": "b:7900"},
}
"""By the word that stands for it: what an alert about a daemon says of it."""
BUILDS = {
    'kvbridge_build_info{PREFILL,role="prefill",daemon="prefill-0/node-0",version="1"}': "1x500",
    'kvbridge_build_info{DECODE,role="decode",daemon="decode-0/node-0",version="1"}': "1x500",
    'kvbridge_build_info{BOOTSTRAP,role="bootstrap",daemon="bootstrap",version="1"}': "1x500",
}
HEALTHY = {
    "up{PREFILL}": "1x500",
    "up{DECODE}": "1x500",
    "kvbridge_ready{DECODE}": "1x500",
    'kvbridge_directory_registration{DECODE,state="registered"}': "1x500",
    'kvbridge_engines{DECODE,state="attached"}': "1x500",
    'kvbridge_rooms{DECODE,state="committed"}': "3x500",
    'kvbridge_rooms_ended_total{DECODE,state="completed",code=""}': "0+150x500",
    'kvbridge_rooms_ended_total{DECODE,state="failed",code="peer_failed"}': "0x500",
    'kvbridge_pool_pages{DECODE,space="full",state="quarantined"}': "0x500",
    'kvbridge_worker_restarts_total{DECODE,reason="killed"}': "0x500",
    "process_open_fds{DECODE}": "80x500",
    "process_max_fds{DECODE}": "1024x500",
}
SPECS = {spec.name + part: spec for spec in METRICS for part in ("", "_bucket", "_sum", "_count")}
LABELS = {"job", "instance", "le", "alertname", "alertstate", "severity"}.union(*(spec.labels for spec in METRICS))
GRAFANA = {"$__rate_interval": "1m", "$__range": "1m", **dict.fromkeys(("$instance", "$role", "$peer", "$space"), ".+")}
"""Grafana's values for its variables."""


def promtool(*arguments: str) -> None:
    """Run promtool; fails with what it prints when it does."""
    found = shutil.which("promtool")
    assert found, "promtool is missing: `make servers` installs it (Debian package prometheus)"
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"promtool {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"


def series(values: Mapping[str, str]) -> list[dict[str, str]]:
    found = []
    for name, written in {**BUILDS, **values}.items():
        for word, labels in DAEMONS.items():
            name = name.replace(word, f'job="kvbridge",instance="{labels["instance"]}"')  # noqa: PLW2901
        found.append({"series": name, "values": written})
    return found


def moment(alert: str, at_s: int, *firing: dict[str, Any]) -> dict[str, Any]:
    return {"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": list(firing)}


def simulate(folder: Path, *tests: Mapping[str, Any]) -> None:
    """Let promtool evaluate the rules on simulated series; `tests` are its test groups."""
    content = {
        "rule_files": [str(path) for path in RULE_FILES],
        "evaluation_interval": f"{STEP_S}s",
        # Without it promtool takes the groups in any order, and an alert may see a recorded series one step late.
        "group_eval_order": [group["name"] for group in GROUPS],
        "tests": [{"interval": f"{STEP_S}s", **test} for test in tests],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(content, sort_keys=False, width=1000))
    promtool("test", "rules", str(folder / "test.yaml"))


def check_names(queries: Iterable[str], also: Iterable[str] = ()) -> set[str]:
    """Return the metrics that queries name. Fails when a metric, a label or a label's word does not exist."""
    named = set()
    for query in queries:
        for name in set(re.findall(r"\b(?:[a-z_]+:)?(?:kvbridge|gen_ai_server)_[a-z0-9_:]+", query)) - set(also):
            assert name in SPECS, f"{name} in {query}"
            named.add(SPECS[name].name)
        by = [label.strip() for found in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in found.split(",")]
        assert {*by, *re.findall(r'(\w+)\s*!?=~?\s*"', query)} - {""} <= LABELS, query
        for name, matchers in re.findall(r"\b((?:kvbridge|gen_ai_server)_\w+)\{([^}]*)\}", query):
            for label, words in re.findall(r'(\w+)\s*=~?\s*"([^"$]*)"', matchers):
                spec = SPECS[name]
                known = spec.values.get(label) or [row[spec.labels.index(label)] for row in spec.series]
                assert not known or "." in words or set(words.split("|")) <= set(known), f"{label}={words} in {query}"
    return named


def accept(folder: Path, queries: Iterable[str]) -> None:
    asked = [{"record": f"asked:{number}", "expr": query} for number, query in enumerate(queries)]
    (folder / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": asked}]}))
    promtool("check", "rules", str(folder / "queries.yaml"))


def test_promtool_accepts_the_rules_and_the_example() -> None:
    promtool("check", "rules", *map(str, RULE_FILES))
    promtool("check", "config", str(FOLDER / "prometheus.yaml"))
    found = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert [FOLDER / name for name in found["rule_files"]] == list(RULE_FILES)


def test_every_alert_has_a_situation_and_a_section_of_the_runbook() -> None:
    assert [situation["alert"] for situation in SITUATIONS] == list(ALERTS)
    sections = re.findall(r"^## (Kvbridge\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sections == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert "{{" not in rule["annotations"]["description"], "a description is the same every time"


def test_each_fires_in_its_situation_and_only_there(tmp_path: Path) -> None:
    tests = []
    for situation in SITUATIONS:
        alert = situation["alert"]
        rule = ALERTS[alert]
        notes = {**rule["annotations"], "summary": situation["summary"]}
        fired = {
            "exp_labels": DAEMONS.get(situation.get("about", ""), {}) | situation.get("labels", {}) | rule["labels"],
            "exp_annotations": {name: text.strip() for name, text in notes.items()},
        }
        assert rule["labels"]["severity"] in {"critical", "warning"}
        at_s = situation["quiet_s"], situation["fires_s"]
        fires = [moment(alert, at_s[0]), moment(alert, at_s[1], fired)]
        never = [moment(alert, each_s) for each_s in range(0, 2 * at_s[1], 60)]
        tests.append({"input_series": series(situation["series"]), "alert_rule_test": fires})
        tests.append({"input_series": series(situation["nearly"]), "alert_rule_test": never})
    simulate(tmp_path, *tests)


def test_all_are_quiet_on_a_healthy_fleet(tmp_path: Path) -> None:
    quiet = [moment(alert, at_s) for alert in ALERTS for at_s in range(0, 3600, 600)]
    simulate(tmp_path, {"input_series": series(HEALTHY), "alert_rule_test": quiet})


def test_rules_name_only_what_exists_and_every_recorded_series_is_used() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    check_names((rule["expr"] for rule in RULES), also=recorded)
    assert not {name for name in recorded if not any(name in rule["expr"] for rule in RULES)}


def test_queries_that_the_runbook_shows_can_be_asked(tmp_path: Path) -> None:
    shown = [span for span in spans(RUNBOOK) if re.search(r"kvbridge_\w+\{\w+=|\(kvbridge_", span)]
    assert len(shown) > 5
    check_names(shown)
    accept(tmp_path, shown)
    assert {name for span in spans(RUNBOOK) for name in re.findall(r"\bkvbridge_\w+", span)} <= SPECS.keys()


def test_boards_name_only_metrics_that_exist_and_show_all(tmp_path: Path) -> None:
    queries = [query.expr for board in BOARDS for panel in board.panels for query in panel.queries]
    variables = [each.values for board in BOARDS for each in (ROLE, INSTANCE, *board.variables)]
    named = check_names(queries) | check_names(re.findall(r"\((.*), \w+\)$", " ".join(variables)))
    assert not {spec.name for spec in METRICS} - named, "a metric that no board shows"
    asked = [*queries, *(expr for _, expr, _ in ANNOTATIONS)]
    for variable, value in GRAFANA.items():
        asked = [query.replace(variable, value) for query in asked]
    accept(tmp_path, asked)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_lie_beside_one_another(board: Board, tmp_path: Path) -> None:
    write(tmp_path)
    panels = json.loads((tmp_path / f"{board.uid}.json").read_text())["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = [panel["gridPos"] for panel in panels]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert max(x for x, _ in cells) < 24
    assert len(set(cells)) == len(cells)
