"""The hooks that a release of vLLM calls, from its source: `python -m tests.vllm.asked VLLM`, a wheel or an installed package.

`asked.txt` has these lines for the newest release that the adapter was written for.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.engines.servers import ROOT

CONNECTOR = ROOT / "kvbridge/engine/vllm/connector.py"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
ASKED = ("KVConnectorBase_V1", "SupportsHMA")
ABSTRACT = "abstract "
READ = (ROOT / "tests/vllm/asked.txt").read_text().splitlines()
"""The lines of vLLM 0.33."""
NEW_IN_0_33 = {
    "restore_kv_caches(self)",
    "supports_sleep_mode(cls, kv_transfer_config)",
    "unregister_kv_caches(self)",
}


def asked(vllm: Path) -> list[str]:
    """Return hooks with the names of their parameters, and the names that the connector imports, as far as they are there."""
    hooks = {line for name in ASKED for line in _hooks(_class(_tree(vllm, BASE), name))}
    return sorted(hooks | {f"{module}.{name}" for module, name in imported() if name in _names(_tree(vllm, module))})


def ours() -> dict[str, str]:
    """Return the connector's own hooks by name."""
    lines = _hooks(_class(ast.parse(CONNECTOR.read_text()), "KvbridgeConnector"))
    return {hook(line): line for line in lines}


def hook(line: str) -> str:
    """Return the name of a hook."""
    return line.removeprefix(ABSTRACT).partition("(")[0]


def imported() -> list[tuple[str, str]]:
    """Return the modules and names of vLLM that the connector imports."""
    nodes = ast.walk(ast.parse(CONNECTOR.read_text()))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")]
    return sorted({(str(node.module), name.name) for node in froms for name in node.names})


def _tree(vllm: Path, module: str) -> ast.Module:
    stem = "/".join(module.split("."))
    if vllm.suffix == ".whl":
        with zipfile.ZipFile(vllm) as wheel:
            name = next(one for one in (f"{stem}.py", f"{stem}/__init__.py") if one in wheel.namelist())
            return ast.parse(wheel.read(name))
    files = (vllm.parent / f"{stem}.py", vllm.parent / stem / "__init__.py")
    return ast.parse(next(file for file in files if file.exists()).read_text())


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _hooks(of: ast.ClassDef) -> Iterator[str]:
    for node in of.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
        if "property" in decorators:
            continue
        for one in (*node.args.args, node.args.vararg, node.args.kwarg):
            if one is not None:
                one.annotation = None
        node.args.defaults = []
        is_abstract = any(one.endswith("abstractmethod") for one in decorators)
        yield f"{ABSTRACT if is_abstract else ''}{node.name}({ast.unparse(node.args)})"


def _names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name for one in node.names}
    return found


if __name__ == "__main__":
    print(*asked(Path(sys.argv[1])), sep="\n")
