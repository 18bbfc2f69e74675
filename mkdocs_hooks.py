"""What the site computes while it is built: the table of all metrics."""

from typing import Any

from kvbridge.telemetry.metrics import metrics_table


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - the type of mkdocs is none of ours
    """Put the table into the page of metrics."""
    return markdown + metrics_table() if page.file.src_uri == "metrics.md" else markdown
