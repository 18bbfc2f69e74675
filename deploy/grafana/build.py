"""Writes the dashboards' JSON files from their descriptions: `python -m deploy.grafana.build`.

Owns: which boards there are, and their files. A test fails when a file is not what its description says.
"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.boards import fleet, overview, pools, room, sparse, transports
from deploy.grafana.panels import render

FOLDER = Path(__file__).with_name("dashboards")
BOARDS = tuple(each.BOARD for each in (overview, room, pools, transports, sparse, fleet))


def files() -> dict[Path, str]:
    """Return every file and what belongs in it."""
    return {FOLDER / f"{board.uid}.json": json.dumps(render(board), indent=1) + "\n" for board in BOARDS}


def main() -> None:
    """Write them, and remove the files of boards that are gone."""
    wanted = files()
    for path in FOLDER.glob("*.json"):
        if path not in wanted:
            path.unlink()
    for path, content in wanted.items():
        path.write_text(content)


if __name__ == "__main__":
    main()
