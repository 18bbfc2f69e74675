"""The imports of an engine author: complete, and shown by scripts and by test engines that use nothing else."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = ("kvbridge.engine", "kvbridge.sparse")
ADAPTERS = "kvbridge.engine.adapters"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("package", PUBLIC)
def test_every_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name).__doc__ for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_use_public_names_only(example: Path) -> None:
    imports = [one for one in ast.walk(ast.parse(example.read_text())) if isinstance(one, ast.Import | ast.ImportFrom)]
    ours = [node for node in imports if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvbridge")]
    assert ours
    assert "kvbridge" not in {name.name.split(".")[0] for node in imports for name in node.names}
    for node in ours:
        assert node.module in PUBLIC
        assert {name.name for name in node.names} <= set(importlib.import_module(node.module).__all__)


@pytest.mark.parametrize("package", PUBLIC)
def test_without_torch_the_library_says_which_extra_brings_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"in a checkout of kvbridge: pip install '\.\[engine\]'"):
        importlib.import_module(package)


def test_engines_of_the_demo_use_public_names_and_adapters_only() -> None:
    files = sorted((ROOT / "kvbridge" / "demo").rglob("*.py"))
    found = {
        (node.module or "", name.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PUBLIC)
        for name in node.names
    }
    public = {name for name in found if not name[0].startswith(ADAPTERS)}
    assert public
    for module, name in public:
        assert module in PUBLIC
        assert name in importlib.import_module(module).__all__


def test_the_guide_shows_how_to_run_each_example_and_copies_none() -> None:
    """`tests/docs` runs what it shows."""
    guide = (ROOT / "docs" / "engines.md").read_text()
    assert {example.stem for example in EXAMPLES} == set(
        re.findall(r"^python examples/(\w+)\.py ", guide, re.MULTILINE)
    )
    assert set(re.findall(r"^```python\n(.*)\n```$", guide, re.MULTILINE)) == {
        f'--8<-- "examples/{example.name}"' for example in EXAMPLES
    }
