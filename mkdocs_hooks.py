"""What the site computes while it is built: the table of all metrics."""

from typing import Any

from kvbridge.telemetry.metrics import EVERYBODY, METRICS, PHASES


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - the type of mkdocs is none of ours
    """Put the table into the page of metrics."""
    return markdown + metrics_table() if page.file.src_uri == "metrics.md" else markdown


def metrics_table() -> str:
    """Return Markdown: every metric in a table, and every phase."""
    lines = ["| name | type | labels | daemons | meaning |", "|---|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        roles = "all" if spec.roles == EVERYBODY else ", ".join(spec.roles)
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {roles} | {spec.help} |")
    lines += ["", "The usual `process_*` metrics are there as well.", "", "## Phases of a room", ""]
    lines += ["| daemon | `phase` | meaning |", "|---|---|---|"]
    lines += [f"| {role} | `{phase}` | {what} |" for role, phases in PHASES.items() for phase, what in phases.items()]
    return "\n".join([*lines, ""])
