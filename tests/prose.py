"""The rules of docstrings that a program can check: part of `make check`.

A sentence of a docstring names its subject first, so none begins with a word of a clause that hangs on another sentence.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANGING = ("What", "Who", "Whose", "Whom", "Of", "So", "That")
BEGINS = re.compile(rf"(?:^|[.!?:]\s+)((?:{'|'.join(HANGING)})\b[^.]{{0,60}})")


def hanging_sentences(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each docstring with a sentence that hangs on another, and how the sentence begins."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = " ".join(node.value.value.split())
            yield from ((node.lineno, found[1]) for found in BEGINS.finditer(text))


def main() -> int:
    """Print each place and return 1 if there is one."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: a sentence of a docstring begins with: {begin}"
        for folder in sys.argv[1:] or ("kvbridge", "tests")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, begin in hanging_sentences(file.read_text())
    ]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
