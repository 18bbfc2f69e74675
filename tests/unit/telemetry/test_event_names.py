"""What the product's log lines are called: one style, by which they can be searched for and counted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kvbridge

LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
EVENT = re.compile(r"[a-z]+(_[a-z]+)*")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(Path(kvbridge.__file__).parent.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def calls(module: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(module) if isinstance(node, ast.Call))


def test_every_line_is_a_constant_event_in_snake_case() -> None:
    found, wrong = 0, []
    for path, module in modules():
        for call in calls(module):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level), args=args) if level in LEVELS:
                    found += 1
                    match args:
                        case [ast.Constant(value=str() as event)] if EVENT.fullmatch(event):
                            pass
                        case _:
                            wrong.append(f"{path.name}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert not wrong
    assert found > 50, "the loggers are not called `log` any more"


def test_every_logger_of_a_module_is_called_log() -> None:
    """Which is how the test above finds them."""
    for path, module in modules():
        for node in ast.walk(module):
            match node:
                case ast.Assign(targets=targets, value=ast.Call(func=called)) if "get_logger" in ast.unparse(called):
                    assert [ast.unparse(target) for target in targets] == ["log"], f"{path}:{node.lineno}"


def test_no_line_gives_itself_the_name_of_another_daemon() -> None:
    """`role`, `instance` and `node` are those of the daemon that writes; others are `peer_name`, `peer_role` and so on."""
    for path, module in modules():
        for call in calls(module):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level), keywords=keys) if (
                    level in LEVELS
                ):
                    wrong = {key.arg for key in keys} & {"role", "instance", "node"}
                    assert not wrong, f"{path.name}:{call.lineno}: {wrong}"
