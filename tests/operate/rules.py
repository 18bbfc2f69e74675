"""The rules as files: read, checked with promtool on simulated time, and made faster for tests in real time.

Owns: the files and promtool. Must not know: which alerts there are.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
RULE_FILES = (FOLDER / "recording.yaml", FOLDER / "alerts.yaml")
_DURATION = re.compile(r"(?<=\[)(\d+)([smh])(?=\])|(?<=offset )(\d+)([smh])\b")
_SECONDS = {"s": 1, "m": 60, "h": 3600}

Rule = dict[str, Any]


def command(name: str) -> str:
    """The path of a program of Prometheus."""
    found = shutil.which(name)
    assert found, f"{name} is missing: `make servers` installs it (Debian package prometheus)"
    return found


def groups(files: Iterable[Path] = RULE_FILES) -> list[dict[str, Any]]:
    """Every group of rules, recording rules first."""
    return [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]


def rules(files: Iterable[Path] = RULE_FILES) -> list[Rule]:
    """Every rule, recording rules first."""
    return [rule for group in groups(files) for rule in group["rules"]]


def alerts() -> dict[str, Rule]:
    """Every alert by its name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str, given: str = "") -> str:
    """Run promtool; returns what it prints. Fails with that when promtool does."""
    done = subprocess.run(
        [command("promtool"), *arguments], input=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"promtool {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_simulated(tests: list[Mapping[str, Any]], folder: Path, *, step_s: int) -> None:
    """Let promtool evaluate the rules on simulated series; `tests` are its test groups."""
    file = folder / "test.yaml"
    content = {
        "rule_files": [str(path) for path in RULE_FILES],
        "evaluation_interval": f"{step_s}s",
        # Without it promtool takes the groups in any order, and an alert may see a recorded series one step late.
        "group_eval_order": [group["name"] for group in groups()],
        "tests": tests,
    }
    file.write_text(yaml.safe_dump(content, sort_keys=False, width=1000))
    promtool("test", "rules", str(file))


def seconds(duration: str) -> float:
    """A duration as Prometheus writes it, as `5m`."""
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()  # type: ignore[union-attr]
    return int(number) * _SECONDS[unit]


def write_faster(folder: Path, factor: float, files: Iterable[Path] = RULE_FILES) -> list[Path]:
    """Write the rules with every duration (ranges, offsets, `for`) divided by `factor`; thresholds stay as they are."""

    def shorter(found: re.Match[str]) -> str:
        return _milliseconds(seconds(found[0]) / factor)

    written = []
    for file in files:
        content = yaml.safe_load(file.read_text())
        for group in content["groups"]:
            for rule in group["rules"]:
                rule["expr"] = _DURATION.sub(shorter, rule["expr"])
                if "for" in rule:
                    rule["for"] = _milliseconds(seconds(rule["for"]) / factor)
        written.append(folder / file.name)
        written[-1].write_text(yaml.safe_dump(content, sort_keys=False, width=1000))
    return written


def _milliseconds(duration_s: float) -> str:
    return f"{max(1, round(duration_s * 1000))}ms"
