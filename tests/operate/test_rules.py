"""The rules: well-formed, complete, and right on simulated time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbridge.telemetry.metrics import METRICS
from kvbridge.telemetry.specs import MetricKind
from tests.docs.pages import ROOT, spans
from tests.operate.rules import FOLDER, RULE_FILES, alerts, check_simulated, promtool, rules, write_faster
from tests.operate.situations import BUILDS, DECODE, PREFILL, SITUATIONS, STEP_S, Situation

RUNBOOK = ROOT / "docs" / "runbook.md"
SUFFIXES = ("_bucket", "_sum", "_count")
KNOWN = {spec.name for spec in METRICS}
LABELS = {"job", "instance", "le", "alertname", "severity"} | {label for spec in METRICS for label in spec.labels}


def series(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": written} for name, written in {**BUILDS, **values}.items()]


def expected(situation: Situation) -> dict[str, Any]:
    annotations = alerts()[situation.alert]["annotations"] | {"summary": situation.summary}
    return {
        "exp_labels": {**situation.labels, "severity": situation.severity},
        "exp_annotations": {name: text.strip() for name, text in annotations.items()},
    }


def moment(alert: str, at_s: int, *firing: dict[str, Any]) -> dict[str, Any]:
    return {"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": list(firing)}


def test_promtool_accepts_the_rules_and_the_example() -> None:
    promtool("check", "rules", *map(str, RULE_FILES))
    promtool("check", "config", str(FOLDER / "prometheus.yaml"))


def test_every_alert_has_a_situation() -> None:
    assert [situation.alert for situation in SITUATIONS] == list(dict.fromkeys(each.alert for each in SITUATIONS))
    assert {situation.alert for situation in SITUATIONS} == set(alerts())


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.alert)
def test_it_fires_in_its_situation_and_only_there(situation: Situation, tmp_path: Path) -> None:
    fires = {
        "interval": f"{STEP_S}s",
        "input_series": series(situation.series),
        "alert_rule_test": [
            moment(situation.alert, situation.quiet_s),
            moment(situation.alert, situation.fires_s, expected(situation)),
        ],
    }
    assert situation.nearly
    nearly = {
        "interval": f"{STEP_S}s",
        "input_series": series(situation.nearly),
        "alert_rule_test": [moment(situation.alert, at_s) for at_s in range(0, 3600, 60)],
    }
    check_simulated([fires, nearly], tmp_path, step_s=STEP_S)


def test_all_are_quiet_on_a_healthy_fleet(tmp_path: Path) -> None:
    healthy = {
        f"up{{{PREFILL}}}": "1x500",
        f"up{{{DECODE}}}": "1x500",
        f"kvbridge_ready{{{DECODE}}}": "1x500",
        f'kvbridge_directory_registration{{{DECODE},state="registered"}}': "1x500",
        f'kvbridge_engines{{{DECODE},state="attached"}}': "1x500",
        f'kvbridge_rooms{{{DECODE},state="committed"}}': "3x500",
        f'kvbridge_rooms_ended_total{{{DECODE},state="completed",code=""}}': "0+150x500",
        f'kvbridge_rooms_ended_total{{{DECODE},state="failed",code="peer_failed"}}': "0x500",
        f'kvbridge_pool_pages{{{DECODE},space="full",state="free"}}': "0x500",
        f'kvbridge_pool_pages{{{DECODE},space="full",state="cached"}}': "40x500",
        f'kvbridge_pages_available{{{DECODE},space="full"}}': "40x500",
        f'kvbridge_pool_pages{{{DECODE},space="full",state="held"}}': "60x500",
        f'kvbridge_pool_pages{{{DECODE},space="full",state="quarantined"}}': "0x500",
        f'kvbridge_worker_restarts_total{{{DECODE},reason="killed"}}': "0x500",
        f"process_open_fds{{{DECODE}}}": "80x500",
        f"process_max_fds{{{DECODE}}}": "1024x500",
    }
    quiet = {
        "interval": f"{STEP_S}s",
        "input_series": series(healthy),
        "alert_rule_test": [moment(alert, at_s) for alert in alerts() for at_s in range(0, 7200, 600)],
    }
    check_simulated([quiet], tmp_path, step_s=STEP_S)


@pytest.mark.parametrize("name", alerts())
def test_it_says_what_to_do(name: str) -> None:
    rule = alerts()[name]
    assert name.startswith("Kvbridge")
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    assert "{{" not in notes["description"], "the summary says who and how much; the description is the same every time"
    assert len(notes["summary"]) <= 160
    assert len(notes["description"]) >= 80


def test_rules_name_only_metrics_and_labels_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        for name in re.findall(r"\b[a-z_]*:?kvbridge_[a-z0-9_:]+", rule["expr"]):
            base = name
            for suffix in SUFFIXES:
                base = base.removesuffix(suffix) if base not in KNOWN else base
            assert name in recorded or base in KNOWN, name
        for matcher in re.findall(r"\{([^}]*)\}", rule["expr"]):
            assert set(re.findall(r"(\w+)\s*[=!]", matcher)) <= LABELS, rule["expr"]


def test_label_values_in_rules_exist() -> None:
    """A closed label compared with a word that it never has would be an alert that never fires."""
    specs = {spec.name: spec for spec in METRICS}
    for rule in rules():
        for name, matcher in re.findall(r"\b(kvbridge_\w+)\{([^}]*)\}", rule["expr"]):
            spec = specs[
                next(base for base in (name, *(name.removesuffix(each) for each in SUFFIXES)) if base in specs)
            ]
            for label, words in re.findall(r'(\w+)\s*=~?"([^"]*)"', matcher):
                if label in spec.values:
                    assert set(words.split("|")) <= set(spec.values[label]), (rule, label, words)
                assert spec.kind is not MetricKind.HISTOGRAM or label in {*spec.labels, "le"}


def test_faster_rules_are_the_same_rules(tmp_path: Path) -> None:
    files = write_faster(tmp_path, 60)
    promtool("check", "rules", *map(str, files))
    fast = {rule.get("alert") or rule["record"]: rule for rule in rules(files)}
    assert fast["KvbridgePagesQuarantined"]["for"] == "5000ms"
    assert "[5000ms]" in fast["instance:kvbridge_rooms_ended:rate5m"]["expr"]
    assert "offset 15000ms" in fast["KvbridgeDigestMismatch"]["expr"]
    slow = [rule for rule in rules(files) if re.search(r"\d[smh]\]", str(rule["expr"]).replace("ms]", ""))]
    assert not slow


def test_recording_rules_say_what_they_keep() -> None:
    for rule in rules():
        if "record" in rule:
            levels, metric, _operation = rule["record"].split(":")
            assert metric.startswith("kvbridge_")
            assert all(level for level in levels.split("_")), rule["record"]


def test_the_example_finds_the_rules() -> None:
    found = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert [FOLDER / name for name in found["rule_files"]] == list(RULE_FILES)
    assert all(job["job_name"].startswith("kvbridge") for job in found["scrape_configs"])


def test_queries_that_the_runbook_shows_can_be_asked(tmp_path: Path) -> None:
    """What stands there in backticks: PromQL, over labels that are there."""
    shown = [span for span in spans(RUNBOOK) if re.search(r"kvbridge_\w+\{\w+=|\(kvbridge_", span)]
    assert len(shown) > 5
    written = tmp_path / "queries.yaml"
    asked = [{"record": f"runbook:{number}", "expr": query} for number, query in enumerate(shown)]
    written.write_text(yaml.safe_dump({"groups": [{"name": "runbook", "rules": asked}]}))
    promtool("check", "rules", str(written))
    for query in shown:
        by = [label.strip() for found in re.findall(r"\bby \(([^)]*)\)", query) for label in found.split(",")]
        assert {*by, *re.findall(r"(\w+)=~?\"", query)} <= LABELS, query
