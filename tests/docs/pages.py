"""The blocks of a page of the documentation, as its readers meet them.

Owns: what a block is and what a mark before it says. Must not know: how a block is run.

- A block of ``sh`` or ``python`` is run. One without a language, and ``json``, is what the ``sh`` block before it printed.
- ``yaml`` is a part of a configuration, or a file: ``--8<-- "FILE"``. ``text`` is a drawing.
- A comment in HTML before a block, which readers do not see, is its mark: ``<!-- not run: REASON -->``, or
  ``<!-- keeps running -->`` for one whose last line goes on until the page ends, as in a terminal of its own; Ctrl-C ends it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "kvbridge" / "ARCHITECTURE.md",
        ROOT / "kvbridge" / "THREAT_MODEL.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
KEEPS_RUNNING = "keeps running"
NOT_RUN = "not run: "
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n+)?^(?P<fence>```+)(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
_INCLUDED = re.compile(r'^--8<-- "([^":]+)"$')


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    """What the comment before it says; empty when there is none."""

    @property
    def where(self) -> str:
        """As an editor wants it."""
        return f"{name(self.page)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is run, now or until the page ends."""
        return self.language in {"sh", "python"} and self.reason is None and self.included is None

    @property
    def reason(self) -> str | None:
        """Why it is not run, if a mark says so."""
        return self.mark.removeprefix(NOT_RUN) if self.mark.startswith(NOT_RUN) else None

    @property
    def included(self) -> Path | None:
        """The file that it shows, if it shows one."""
        found = _INCLUDED.match(self.text.strip())
        return ROOT / found[1] if found else None


def name(page: Path) -> str:
    """A page as it is named in this repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in their order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("fence")) + 1,
            found["language"],
            found["text"],
            found["mark"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def spans(page: Path) -> list[str]:
    """What stands in backticks in the text, on one line each."""
    prose = _BLOCK.sub("", page.read_text())
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
