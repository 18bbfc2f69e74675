"""How large the package is, and how much of it decides something: `make size`.

Every physical line of a Python file counts once. A line of logic is a line of code that is no import, signature, decorator,
`raise`, class field or module constant, and that is neither blank nor a comment nor a docstring.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("logic", "imports", "signatures", "raises", "tables", "fields", "docs", "blank")


def parts_of(source: str) -> Counter[str]:
    """Count the lines of one file by what they are."""
    kinds = [_kind_by_text(line) for line in source.splitlines()]
    for kind, first, last in _spans(ast.parse(source)):
        for line in range(first - 1, last):
            if kind == "docs" or kinds[line] == "logic":
                kinds[line] = kind
    return Counter(kinds)


def _kind_by_text(line: str) -> str:
    text = line.strip()
    return "blank" if not text else "docs" if text.startswith("#") else "logic"


def _spans(module: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first line and last line of everything that is not logic."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield "tables", *_lines(node)
    for node in ast.walk(module):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield "imports", *_lines(node)
            case ast.Raise():
                yield "raises", *_lines(node)
            case ast.Expr(value=ast.Constant(value=str())):
                yield "docs", *_lines(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                head = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                yield "signatures", head, max(node.lineno, node.body[0].lineno - 1)
        if isinstance(node, ast.ClassDef):
            yield from (("fields", *_lines(each)) for each in node.body if isinstance(each, ast.AnnAssign))


def _lines(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def main() -> int:
    """Print a row for each package of kvbridge, and one for the tests."""
    rows: dict[str, tuple[int, Counter[str]]] = {}
    for folder, depth in (("kvbridge", 1), ("tests", 0)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = "tests" if not depth else path.relative_to(ROOT).parts[depth]
            files, counted = rows.get(name, (0, Counter()))
            rows[name] = files + 1, counted + parts_of(path.read_text())
    package = [row for name, row in rows.items() if name != "tests"]
    rows["kvbridge"] = sum(files for files, _ in package), sum((counted for _, counted in package), Counter())
    print(f"{'':14}{'files':>7}{'lines':>8}" + "".join(f"{part:>11}" for part in PARTS) + f"{'logic %':>9}")
    for name, (files, counted) in sorted(rows.items(), key=lambda row: row[1][1].total()):
        share = 100 * counted["logic"] / max(1, counted.total())
        print(
            f"{name:14}{files:7}{counted.total():8}"
            + "".join(f"{counted[part]:11}" for part in PARTS)
            + f"{share:9.0f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
