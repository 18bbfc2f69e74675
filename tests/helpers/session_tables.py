"""The tables of a room, on both sides, as one page for people: `kvbridge/core/session/TABLES.md`, which a test compares."""

import sys
from typing import Any

from kvbridge.core.session.decode import DECODE_HEARS, DECODE_TABLE
from kvbridge.core.session.prefill import PREFILL_HEARS, PREFILL_TABLE
from kvbridge.core.session.tables import Hearing, Table

_HEAD = """# The life of a room

Printed from the literals in `prefill.py` and `decode.py` by `python -m tests.helpers.session_tables`; do not edit.
What a row does not list is refused in that state.

Each side has two tables: what events lead to, and what a message about a room means before it leads to any event. A message that is
not listed is refused and counted (`kvbridge_room_messages_refused_total`), and changes nothing of the room.
"""


def tables_markdown() -> str:
    prefill = f"## Prefill side\n\n{_markdown(PREFILL_TABLE)}\n{_heard(PREFILL_HEARS)}"
    decode = f"## Decode side\n\n{_markdown(DECODE_TABLE)}\n{_heard(DECODE_HEARS)}"
    return f"{_HEAD}\n{prefill}\n{decode}"


def _heard(hearing: Hearing[Any, Any]) -> str:
    lines = ["| state | who speaks | message: what it means |", "|---|---|---|"]
    for state, speakers in [*hearing.rows.items(), ("not known", hearing.unknown)]:
        for speaker, row in speakers.items():
            said = ", ".join(f"{message}: {meaning}" for message, meaning in row.items())
            lines.append(f"| {state} | {speaker} | {said} |")
        if not speakers:
            lines.append(f"| {state} | nobody | |")
    return "\n".join(lines) + "\n"


def _markdown(table: Table[Any, Any, Any]) -> str:
    lines = ["| state | event | next state | actions |", "|---|---|---|---|"]
    for state, events in table.rows.items():
        for event, (target, actions) in events.items():
            lines.append(f"| {state} | {event} | {target} | {', '.join(actions)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables_markdown())
