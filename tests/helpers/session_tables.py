"""Both transition tables of a room as one page for people: the text of `kvbridge/core/session/TABLES.md`, which a test compares."""

from __future__ import annotations

import sys
from typing import Any

from kvbridge.core.session.machine import Table
from kvbridge.core.session.receiver import RECEIVER_TABLE
from kvbridge.core.session.sender import SENDER_TABLE

_HEAD = """# The life of a room

Printed from the literals in `sender.py` and `receiver.py` by `python -m tests.helpers.session_tables`; do not edit.
What a row does not list is refused in that state.
"""


def tables_markdown() -> str:
    """Return both transition tables as Markdown."""
    return f"{_HEAD}\n## Prefill side\n\n{_markdown(SENDER_TABLE)}\n## Decode side\n\n{_markdown(RECEIVER_TABLE)}"


def _markdown(table: Table[Any, Any, Any]) -> str:
    """One line a transition, in the order of the literal."""
    lines = ["| state | event | next state | actions |", "|---|---|---|---|"]
    for state, events in table.rows.items():
        for event, (target, actions) in events.items():
            lines.append(f"| {state} | {event} | {target} | {', '.join(actions)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables_markdown())
