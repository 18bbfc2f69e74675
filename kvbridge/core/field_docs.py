"""The docstrings below the fields of models, for published JSON schemas. Nothing is read before somebody asks for a schema."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache


def field_docs(kind: type) -> dict[str, str]:
    """Return the text below each field of a class and of its bases, as one line each."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _of_module(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the fields of every class at the top of a module; empty when its source is not there."""
    if not name.startswith("kvbridge."):
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except OSError:
        return {}
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[field.target.id] = " ".join(text.split())
    return found
