"""Writes the dashboards' JSON files from their descriptions: `python -m deploy.grafana.build FOLDER`.

Needs nothing but Python, since the wheel is built with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deploy.grafana.boards import fleet, overview, pools, room, transports
from deploy.grafana.panels import render

BOARDS = tuple(each.BOARD for each in (overview, room, pools, transports, fleet))


def write(folder: Path) -> None:
    """Write a file for each board."""
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(json.dumps(render(board), indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
