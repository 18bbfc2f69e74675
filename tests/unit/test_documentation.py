"""The documentation keeps up with what it is about: alerts, metrics, log events, configuration, commands, pages."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from kvbridge import __version__
from kvbridge.engine import __all__ as engine_names
from kvbridge.sparse import __all__ as sparse_names
from kvbridge.telemetry.facts import Fact
from kvbridge.telemetry.metrics import METRICS
from tests.helpers.example_configs import known_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SECTION = re.compile(r"^## (Kvbridge\w+)$", re.MULTILINE)


def alerts() -> dict[str, str]:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    return {rule["alert"]: rule["annotations"]["runbook_url"] for group in rules["groups"] for rule in group["rules"]}


def severities() -> dict[str, str]:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    return {rule["alert"]: rule["labels"]["severity"] for group in rules["groups"] for rule in group["rules"]}


def sections() -> dict[str, str]:
    _, *parts = SECTION.split((DOCS / "runbook.md").read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    assert list(sections()) == list(alerts())


def test_the_link_of_an_alert_leads_to_its_section() -> None:
    assert alerts() == {name: f"docs/runbook.md#{name.lower()}" for name in sections()}


@pytest.mark.parametrize("name", sections())
def test_a_section_says_what_it_means_where_to_look_and_what_to_do(name: str) -> None:
    text = sections()[name]
    assert text.startswith(f"\n\n*{severities()[name]}* · ")
    assert "**Meaning.**" in text
    assert "**First look" in text
    assert "**Cure.**" in text or "**First look and cure.**" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_that_are_named_are_there(page: Path) -> None:
    declared = {spec.name for spec in METRICS}
    assert set(re.findall(r"\bkvbridge_[a-z_]+", page.read_text())) <= declared


def test_log_events_that_the_runbook_names_are_written() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "kvbridge").rglob("*.py"))
    written = re.findall(r"\b(?:log|_rooms)\.\w+\(\s*\"([a-z_]+)\"", source)
    events = {*written, *(kind.line.split()[1] for kind in Fact.kinds if kind.line), "library_output"}
    named = set(
        re.findall(
            r"`((?:room|peer|worker|engine|daemon|frame|fence|store|bootstrap|request|accept|allowed|lines|writers|transport)_[a-z_]+)`",
            (DOCS / "runbook.md").read_text(),
        )
    )
    labels = {each for spec in METRICS for values in spec.values.values() for each in values}
    fields = {"peer_name", "daemon_user"}
    codes = {"transport_failed", "peer_failed"}
    assert named - labels - fields - codes <= events


def test_keys_of_the_configuration_that_are_named_are_there() -> None:
    known = known_keys()
    sections_of = {key.split(".")[0] for key in known}
    for page in PAGES:
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", page.read_text()):
            if (
                key.split(".")[0] in sections_of
                and key not in {"bootstrap.state", "bootstrap.problem"}
                and not key.endswith((".yaml", ".service"))
            ):
                assert key in known, f"{page.name}: {key}"


def test_the_engine_guide_has_every_public_name() -> None:
    text = (DOCS / "engines.md").read_text()
    documented = set(re.findall(r"^::: kvbridge\.(?:engine|sparse)\.(\w+)$", text, re.MULTILINE))
    assert documented == set(engine_names) | set(sparse_names)


def test_every_page_is_in_the_site_and_every_picture_is_used() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w-]+\.md", yaml.safe_dump(site["nav"])))
    assert named == {page.name for page in PAGES}
    used = {Path(path).name for page in PAGES for path in re.findall(r"\(images/([^)#]+)", page.read_text())}
    assert used == {path.name for path in (DOCS / "images").iterdir()}


def test_the_versions_of_python_that_are_promised_are_those_that_were_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    run = re.findall(r"^\| (3\.\d+) \|", (DOCS / "limits.md").read_text(), re.MULTILINE)
    allowed = SpecifierSet(project["requires-python"])
    assert named == run == [f"3.{minor}" for minor in range(50) if allowed.contains(f"3.{minor}.1")]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in run
    results = " ".join(path.read_text() for path in (ROOT / "tests" / "bench" / "results").glob("*.json"))
    measured = set(re.findall(r'"python": "(3\.\d+)\.', results))
    assert measured
    assert measured <= set(run)


def test_the_changelog_has_this_version() -> None:
    assert re.search(
        rf"^## \[{re.escape(__version__)}\] - (unreleased|\d{{4}}-\d\d-\d\d)$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )


def test_messages_that_the_troubleshooting_page_explains_are_in_the_code() -> None:
    """A message that was rewritten would lead nobody to its row."""
    code = "".join(path.read_text() for path in (ROOT / "kvbridge").rglob("*.py"))
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    named = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(named) >= len(rows) > 8
    assert [message for message in named if message not in code] == []
