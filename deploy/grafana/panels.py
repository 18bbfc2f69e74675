"""The vocabulary of the dashboards: what a panel, a row and a board are, and how they look.

Owns: style (legends, units, sizes) and the JSON that Grafana reads. Must not know: which metrics there are
(`boards/`), what has which colour (`colours.py`).
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from deploy.grafana.colours import BLUE, COLOURS, DASHED, VERMILLION

Json = dict[str, Any]

DATA_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
TAG = "kvbridge"
_COLUMNS = 24


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel. `legend` is Grafana's template, as `{{state}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `about` says what one sees and, where that is not plain, what it means.

    `empty_unless` names the situation without which none of its queries has data; it is shown with the panel, and the tests
    that evaluate every query accept an empty answer there and nowhere else.
    """

    title: str
    about: str
    queries: tuple[Query, ...]
    kind: str
    unit: str = "short"
    width: int = 8
    height: int = 8
    options: Json = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    overrides: tuple[Json, ...] = ()
    transformations: tuple[Json, ...] = ()
    format: str = "time_series"
    repeat: str = ""
    empty_unless: str = ""


class Size(TypedDict, total=False):
    """What every kind of panel may be given beside its own."""

    width: int
    height: int
    repeat: str
    empty_unless: str


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, from left to right."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a board: the values of a label."""

    name: str
    label: str
    values: str
    """A query of Grafana's Prometheus source, as `label_values(metric, label)`."""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `uid` is its permanent name in links."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Every panel that has queries."""
        return tuple(panel for row in self.rows for panel in row.panels if panel.queries)


ROLE = Variable("role", "Role", "label_values(kvbridge_build_info, role)")
INSTANCE = Variable("instance", "Daemon", 'label_values(kvbridge_build_info{role=~"$role"}, instance)')

# ------------------------------------------------------------------ panels


def lines(
    title: str, about: str, *queries: Query, unit: str = "short", stacked: bool = False, **more: Unpack[Size]
) -> Panel:
    """Values over time. `stacked` is for parts of a whole."""
    custom: Json = {
        "drawStyle": "line",
        "lineInterpolation": "linear",
        "lineWidth": 1 if stacked else 2,
        "fillOpacity": 60 if stacked else 0,
        "showPoints": "never",
        "spanNulls": False,
        "axisSoftMin": 0,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    return Panel(
        title=title,
        about=about,
        queries=queries,
        kind="timeseries",
        unit=unit,
        options={
            "legend": {
                "showLegend": True,
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["mean", "max", "lastNotNull"],
                "sortBy": "Max",
                "sortDesc": True,
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        defaults={"custom": custom, "color": {"mode": "continuous-BlYlRd", "seriesBy": "max"}},
        overrides=tuple(
            _named_series(name, colour)
            for legend in dict.fromkeys(query.legend for query in queries)
            for name, colour in COLOURS.get(legend, {}).items()
        ),
        **more,
    )


def number(
    title: str, about: str, expr: str, *, unit: str = "short", bad_above: float | None = None, **more: Unpack[Size]
) -> Panel:
    """The value now. From `bad_above` on it is shown in the colour of trouble, else in blue."""
    steps: list[Json] = [{"value": None, "color": BLUE}]
    if bad_above is not None:
        steps.append({"value": bad_above, "color": VERMILLION})
    return Panel(
        title=title,
        about=about,
        queries=(Query(expr),),
        kind="stat",
        unit=unit,
        options={
            "graphMode": "area",
            "colorMode": "value",
            "justifyMode": "auto",
            "textMode": "auto",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
        defaults={"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}},
        **{"width": 4, "height": 4, **more},
    )


def heat(title: str, about: str, expr: str, *, unit: str, **more: Unpack[Size]) -> Panel:
    """A histogram over time; `expr` gives its buckets by `le`."""
    return Panel(
        title=title,
        about=about,
        queries=(Query(expr, "{{le}}"),),
        kind="heatmap",
        unit=unit,
        format="heatmap",
        options={
            "calculate": False,
            "color": {
                "mode": "scheme",
                "scheme": "Blues",
                "fill": BLUE,
                "scale": "exponential",
                "exponent": 0.5,
                "steps": 64,
                "reverse": False,
            },
            "showValue": "never",
            "cellGap": 1,
            "yAxis": {"unit": unit, "axisPlacement": "left"},
            "rowsFrame": {"layout": "auto"},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
            "exemplars": {"color": VERMILLION},
            "filterValues": {"le": 1e-9},
        },
        defaults={"custom": {"scaleDistribution": {"type": "linear"}}},
        **{"width": 12, **more},
    )


def table(
    title: str,
    about: str,
    columns: Mapping[str, Query],
    by: Sequence[str],
    *,
    units: Mapping[str, str],
    **more: Unpack[Size],
) -> Panel:
    """What is true now, a line for each set of values of the labels `by`. `columns`: heading to the query of its values."""
    letters = dict(zip(columns, string.ascii_uppercase, strict=False))
    names = {f"Value #{letter}": heading for heading, letter in letters.items()}
    hidden = {"Time": True} | {f"Time {number}": True for number in range(1, len(columns) + 1)}
    return Panel(
        title=title,
        about=about,
        queries=tuple(columns.values()),
        kind="table",
        format="table",
        options={
            "frameIndex": 0,
            "showHeader": True,
            "cellHeight": "sm",
            "footer": {"show": False, "reducer": ["sum"], "countRows": False},
            "sortBy": [{"displayName": next(iter(columns)), "desc": True}],
        },
        defaults={
            "custom": {"align": "auto", "inspect": False, "filterable": True},
            "color": {"mode": "fixed", "fixedColor": BLUE},
        },
        overrides=tuple(
            {"matcher": {"id": "byName", "options": heading}, "properties": [{"id": "unit", "value": unit}]}
            for heading, unit in units.items()
        ),
        transformations=(
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": hidden,
                    "indexByName": {name: place for place, name in enumerate([*by, *names])},
                    "renameByName": names,
                },
            },
        ),
        **{"width": 24, **more},
    )


def text(content: str, **more: Unpack[Size]) -> Panel:
    """Words beside the figures, in Markdown."""
    options = {"mode": "markdown", "content": content}
    return Panel(title="", about="", queries=(), kind="text", options=options, **{"width": 24, "height": 4, **more})


def _named_series(name: str, colour: str) -> Json:
    properties: list[Json] = [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}]
    if name in DASHED:
        properties.append({"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [6, 4]}})
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


# ------------------------------------------------------------------ JSON


def render(board: Board) -> Json:
    """Return the dashboard as Grafana reads it."""
    panels, top = [], 0
    for row in board.rows:
        panels.append(_heading(row.title, number=len(panels) + 1, top=top))
        top += 1
        left = line_height = 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                top, left, line_height = top + line_height, 0, 0
            panels.append(_panel(panel, len(panels) + 1, {"x": left, "y": top, "w": panel.width, "h": panel.height}))
            left, line_height = left + panel.width, max(line_height, panel.height)
        top += line_height
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.about,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_data_source(), *map(_variable, (ROLE, INSTANCE, *board.variables))]},
        "annotations": {"list": [_annotation(name, expr, colour) for name, expr, colour in ANNOTATIONS]},
        "links": [_link()],
        "panels": panels,
    }


ANNOTATIONS = (
    ("Daemon started", 'time() - process_start_time_seconds{instance=~"$instance"} < 60', BLUE),
    ("Alert firing", 'ALERTS{alertname=~"Kvbridge.*", alertstate="firing"}', VERMILLION),
)
"""Marked on every panel: name, expression, colour."""


def _panel(panel: Panel, number: int, place: Json) -> Json:
    about = f"{panel.about}\n\nEmpty unless {panel.empty_unless}." if panel.empty_unless else panel.about
    instant = panel.kind in {"table", "stat"} and panel.format == "table"
    made: Json = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": about,
        "gridPos": place,
        "options": panel.options,
    }
    if panel.queries:
        made["datasource"] = DATA_SOURCE
        made["targets"] = [
            {
                "refId": letter,
                "datasource": DATA_SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "format": panel.format,
                "instant": instant,
                "range": not instant,
                "editorMode": "code",
            }
            for letter, query in zip(string.ascii_uppercase, panel.queries, strict=False)
        ]
        made["fieldConfig"] = {"defaults": {"unit": panel.unit, **panel.defaults}, "overrides": list(panel.overrides)}
    if panel.transformations:
        made["transformations"] = list(panel.transformations)
    if panel.repeat:
        made |= {"repeat": panel.repeat, "repeatDirection": "h", "maxPerRow": 4}
    return made


def _heading(title: str, *, number: int, top: int) -> Json:
    place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _data_source() -> Json:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": variable.values,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _annotation(name: str, expr: str, colour: str) -> Json:
    return {"name": name, "enable": True, "iconColor": colour, "datasource": DATA_SOURCE, "expr": expr}


def _link() -> Json:
    return {
        "title": "kvbridge",
        "type": "dashboards",
        "tags": [TAG],
        "icon": "external link",
        "tooltip": "The other boards, for the same daemons and time",
        "asDropdown": True,
        "targetBlank": False,
        "includeVars": True,
        "keepTime": True,
    }
