"""Both tables as one page for people.

Owns: the text of `TABLES.md`, which a test compares with these literals. Must not know: how the tables are used.
"""

from __future__ import annotations

from kvbridge.core.session.receiver import RECEIVER_TABLE
from kvbridge.core.session.sender import SENDER_TABLE

_HEAD = """# The life of a room

Printed from the literals in `sender.py` and `receiver.py` by `python -m kvbridge.core.session.tables`; do not edit.
What a row does not list is refused in that state.
"""


def tables_markdown() -> str:
    """Return both transition tables as Markdown."""
    return f"{_HEAD}\n## Prefill side\n\n{SENDER_TABLE.markdown()}\n## Decode side\n\n{RECEIVER_TABLE.markdown()}"


if __name__ == "__main__":
    import sys

    sys.stdout.write(tables_markdown())
