"""The dashboards' files: what their descriptions say, as Grafana's own schema wants them, readable for everybody."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from deploy.grafana.build import BOARDS, FOLDER, files
from deploy.grafana.panels import Board, Panel
from kvbridge.telemetry.metrics import METRICS

SCHEMAS = Path(__file__).parents[1] / "data" / "grafana-schema"
PANELS = [pytest.param(panel, id=f"{board.uid}: {panel.title}") for board in BOARDS for panel in board.panels]
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")
OF_PROMETHEUS = {"process_", "ALERTS", "scrape_"}


def schema(name: str, definition: str) -> jsonschema_rs.Draft7Validator:
    definitions = json.loads((SCHEMAS / f"{name}.jsonschema.json").read_text())["definitions"]
    if name == "dashboard":
        # Three types in it are narrower than Grafana's own: what a matcher looks for and what an override sets can be anything
        # (a name, a unit), and the first threshold has no value, as its description says.
        definitions["MatcherConfig"]["properties"]["options"] = {}
        definitions["DynamicConfigValue"]["properties"]["value"] = {}
        definitions["Threshold"]["properties"]["value"]["type"] = ["number", "null"]
    return jsonschema_rs.Draft7Validator({"$ref": f"#/definitions/{definition}", "definitions": definitions})


DASHBOARD, ROW, PANEL = (schema("dashboard", name) for name in ("Dashboard", "RowPanel", "Panel"))
TARGET = schema("prometheus", "dataquery")
OPTIONS = {kind: schema(kind, "Options") for kind in ("timeseries", "stat", "heatmap", "table", "text")}
FIELDS = {kind: schema(kind, "FieldConfig") for kind in ("timeseries", "heatmap", "table")}
UNITS = {
    definition["const"]
    for definition in json.loads((SCHEMAS / "units.jsonschema.json").read_text())["definitions"].values()
    if "const" in definition
}


def dashboard(board: Board) -> dict[str, Any]:
    return json.loads((FOLDER / f"{board.uid}.json").read_text())


def test_files_are_what_the_descriptions_say() -> None:
    wanted = files()
    assert {path: path.read_text() for path in FOLDER.glob("*.json")} == wanted, "run `make dashboards`"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_grafana_can_read_it(board: Board) -> None:
    content = dashboard(board)
    for panel in content["panels"]:
        kind = panel["type"]
        (ROW if kind == "row" else PANEL).validate(panel)
        if kind == "row":
            continue
        OPTIONS[kind].validate(panel["options"])
        if kind in FIELDS:
            FIELDS[kind].validate(panel["fieldConfig"]["defaults"]["custom"])
        for target in panel.get("targets", ()):
            TARGET.validate(target)
        if "fieldConfig" in panel:
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    DASHBOARD.validate(content)


@pytest.mark.parametrize("change", ["unknown key", "wrong type", "wrong word"])
def test_the_schema_would_notice(change: str) -> None:
    """It is strict: what Grafana does not know is an error, not ignored."""
    content = dashboard(BOARDS[0])
    panel = next(panel for panel in content["panels"] if panel["type"] == "timeseries")
    if change == "unknown key":
        panel["titel"] = "x"
        assert not PANEL.is_valid(panel)
    elif change == "wrong type":
        content["refresh"] = 30
        assert not DASHBOARD.is_valid(content)
    else:
        panel["options"]["legend"]["displayMode"] = "tables"
        assert not OPTIONS["timeseries"].is_valid(panel["options"])


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_lie_beside_one_another(board: Board) -> None:
    taken: dict[tuple[int, int], str] = {}
    panels = dashboard(board)["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for cell in [
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]:
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_explains_itself(panel: Panel) -> None:
    assert panel.title[0].isupper()
    assert len(panel.about) >= 10
    assert panel.about.endswith(".")
    assert all(query.legend or panel.kind in {"stat", "table"} for query in panel.queries)


def test_series_have_the_same_colour_on_every_board_and_one_that_everybody_tells_apart() -> None:
    safe = {"#999999", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    by_name: dict[str, str] = {}
    for board in BOARDS:
        assert set(re.findall(r"#[0-9A-Fa-f]{6}\b", json.dumps(dashboard(board)))) <= safe
        assert not set(re.findall(r'"(?:fixedColor|color)": "([a-z-]+)"', json.dumps(dashboard(board))))
        for panel in dashboard(board)["panels"]:
            for override in panel.get("fieldConfig", {}).get("overrides", ()):
                for each in override["properties"]:
                    if each["id"] == "color":
                        name, colour = override["matcher"]["options"], each["value"]["fixedColor"]
                        assert by_name.setdefault(name, colour) == colour, name


def test_boards_name_only_metrics_that_exist_and_show_all() -> None:
    known = {spec.name for spec in METRICS}
    named: set[str] = set()
    for board in BOARDS:
        expressions = [query.expr for panel in board.panels for query in panel.queries]
        for name in re.findall(r"\bkvbridge_\w+", " ".join([*expressions, *(each.values for each in board.variables)])):
            base = (
                name
                if name in known
                else next((name.removesuffix(p) for p in HISTOGRAM_PARTS if name.endswith(p)), name)
            )
            assert base in known, f"{board.uid}: {name}"
            named.add(base)
    assert not known - named, "a metric that no board shows"
