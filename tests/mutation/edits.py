"""Small edits of the package's functions: each is a defect that some test has to notice.

Owns: which edits there are, their names, and the edited code. Must not know: tests.

An edit is named by its file, function, kind and text, not by its line: code above it may come and go.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvbridge"
_PAIRS = ((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_OPPOSITES = dict(_PAIRS) | {right: left for left, right in _PAIRS}


@dataclass(frozen=True, order=True)
class Edit:
    """One edit. `name` finds the edit again after lines have moved."""

    file: str
    """Path below the repository's root."""
    function: str
    """Classes and functions around the edit, joined by dots."""
    kind: str
    """`negate`, `compare`, `and/or`, `drop call` or `drop assignment`."""
    text: str
    """The edited expression or statement, on one line."""
    number: int
    """Among the edits of a function with the same kind and text, in the order of the file."""
    line: int = 0
    """First line of the edited node today."""

    @property
    def name(self) -> str:
        """Return what names this edit in a list of results."""
        return f"{self.file}::{self.function}::{self.kind}::{self.text}::{self.number}"

    @property
    def package(self) -> str:
        """Return the subpackage, as `node`."""
        return self.file.split("/")[1].removesuffix(".py")


def edits_of(path: Path) -> list[Edit]:
    finder = _Finder(str(path.relative_to(ROOT)))
    finder.visit(ast.parse(path.read_text()))
    return finder.found


def all_edits() -> Iterator[Edit]:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield from edits_of(path)


def edited(edit: Edit) -> CodeType:
    """Return the code of the edit's module with the edit made. Raises LookupError when the code has no such place any more."""
    path = ROOT / edit.file
    tree = ast.parse(path.read_text())
    editor = _Finder(edit.file, wanted=edit.name)
    tree = ast.fix_missing_locations(editor.visit(tree))
    if not editor.done:
        raise LookupError(edit.name)
    code: CodeType = compile(tree, str(path), "exec")
    return code


class _Finder(ast.NodeTransformer):
    """Lists edits; makes the one that is wanted."""

    def __init__(self, file: str, wanted: str = "") -> None:
        self.found: list[Edit] = []
        self.done = False
        self._file, self._wanted = file, wanted
        self._around: list[str] = []
        self._is_in_function = False
        self._seen: Counter[tuple[str, str, str]] = Counter()

    def _inside(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.AST:
        was = self._is_in_function
        self._around.append(node.name)
        self._is_in_function = was or not isinstance(node, ast.ClassDef)
        # Decorators, annotations and defaults belong to the module: an edit there is an error of the import.
        node.body = [found for each in node.body if (found := self.visit(each)) is not None]
        self._around.pop()
        self._is_in_function = was
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inside  # noqa: N815 - names of ast

    def _makes(self, node: ast.expr | ast.stmt, kind: str) -> bool:
        """Note an edit; whether this is the one that is to be made."""
        if not self._is_in_function:
            return False
        text = " ".join(ast.unparse(node).split())[:100]
        function = ".".join(self._around)
        key = function, kind, text
        edit = Edit(self._file, function, kind, text, self._seen[key], node.lineno)
        self._seen[key] += 1
        self.found.append(edit)
        self.done = self.done or edit.name == self._wanted
        return edit.name == self._wanted

    def visit_If(self, node: ast.If) -> ast.AST:
        makes = self._makes(node.test, "negate")
        self.generic_visit(node)
        if makes:
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        makes = self._makes(node, "compare")
        self.generic_visit(node)
        if makes:
            node.ops[0] = _OPPOSITES[type(node.ops[0])]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        makes = self._makes(node, "and/or")
        self.generic_visit(node)
        if makes:
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        makes = isinstance(called, ast.Call) and self._makes(node, "drop call")
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if makes else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # A name that is never bound is an error that every test notices.
        makes = not isinstance(node.targets[0], ast.Name | ast.Tuple) and self._makes(node, "drop assignment")
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if makes else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        makes = self._makes(node, "drop assignment")
        self.generic_visit(node)
        return ast.copy_location(ast.Pass(), node) if makes else node
