"""All that SGLang's schedulers ask of a transfer backend, read in the source of a release: `python -m tests.sglang.asked SGLANG`.

`SGLANG` is the directory of the package `sglang`. A line is a name with its use: `sender.send(_, _, num_kv_tokens)` is called so,
`sender.abort?` may be absent, `manager._staging_handler=` is set. Behind the names come the abstract classes and the numbers.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

HOLDERS = {
    "kv_manager": "manager",
    "kv_mgr": "manager",
    "disagg_kv_sender": "sender",
    "kv_receiver": "receiver",
}
"""Attributes of SGLang's objects that hold one of a backend's."""
LOCALS = {
    "kv_manager": "manager",
    "kv_mgr": "manager",
    "sender": "sender",
    "poller": "poller",
    "prefill_info": "server",
}
"""Variables of SGLang's functions that do. A poller is a sender or a receiver."""
CLASSES = {f"kv_{kind}_class": kind for kind in ("manager", "sender", "receiver", "bootstrap_server")}
"""Variables that hold one of a backend's classes."""


def asked(sglang: Path) -> list[str]:
    """Return the lines of a release, ascending."""
    found = set()
    for folder, pattern in (("disaggregation", "*.py"), ("managers", "**/*.py")):
        for file in sorted((sglang / "srt" / folder).glob(pattern)):
            found.update(_uses(ast.parse(file.read_text()), LOCALS if folder == "disaggregation" else {}))
    return sorted(found) + list(_base_classes(ast.parse((sglang / "srt/disaggregation/base/conn.py").read_text())))


def names(lines: list[str], *, needed: bool = False) -> set[str]:
    """Return the names without their uses. `needed`: without those that are set, or of which SGLang asks whether they are there."""
    found = {(match[0], line[-1]) for line in lines if (match := re.match(r"\w+\.\w+", line))}
    optional = {name for name, use in found if use in "?="} if needed else set()
    return {name for name, _ in found} - optional


def answered(backend: Path, sglang: Path) -> dict[str, set[str]]:
    """Return the names that the backend's classes have, by `manager`, `sender`, `receiver`, from the source of both."""
    trees = [ast.parse(backend.read_text()), ast.parse((sglang / "srt/disaggregation/base/conn.py").read_text())]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    kinds = {"manager": "KvbridgeManager", "sender": "KvbridgeSender", "receiver": "KvbridgeReceiver"}
    return {kind: set(_members(name, classes)) for kind, name in kinds.items()}


def _members(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    if (found := classes.get(name)) is None:
        return
    for base in found.bases:
        yield from _members(ast.unparse(base), classes)
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef):
            if not isinstance(node.body[-1], ast.Raise):  # as the bases do where a backend may do without
                yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _uses(tree: ast.Module, variables: dict[str, str]) -> Iterator[str]:
    called = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and (kind := _kind(node.func.value, variables)):
            called.add(node.func)
            yield f"{kind}.{node.func.attr}({_arguments(node)})"
        elif isinstance(node.func, ast.Name) and node.func.id in CLASSES:
            yield f"{CLASSES[node.func.id]}({_arguments(node)})"
        elif isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            kind, name = _kind(node.args[0], variables), node.args[1]
            if kind and isinstance(name, ast.Constant):
                yield f"{kind}.{name.value}?"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in called and (kind := _kind(node.value, variables)):
            yield f"{kind}.{node.attr}{'=' if isinstance(node.ctx, ast.Store) else ''}"


def _kind(node: ast.expr, variables: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return HOLDERS.get(node.attr, "")
    return variables.get(node.id, "") if isinstance(node, ast.Name) else ""


def _arguments(call: ast.Call) -> str:
    given = ["*_" if isinstance(one, ast.Starred) else "_" for one in call.args]
    return ", ".join(given + sorted(one.arg or "**_" for one in call.keywords))


def _base_classes(tree: ast.Module) -> Iterator[str]:
    for found in tree.body:
        if not isinstance(found, ast.ClassDef):
            continue
        for node in found.body:
            match node:
                case ast.FunctionDef():
                    for argument in (*node.args.args, *node.args.kwonlyargs):
                        argument.annotation = None
                    marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
                    yield f"{found.name}: {marks}{node.name}({ast.unparse(node.args)})"
                case ast.Assign() | ast.AnnAssign():
                    yield f"{found.name}: {ast.unparse(node)}"


if __name__ == "__main__":
    print("\n".join(asked(Path(sys.argv[1]))))
