"""The threat model names tests for what it says cannot be done: they exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "kvbridge" / "THREAT_MODEL.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_there_are_enough_of_them():
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda value: value.rsplit("/", 1)[-1])
def test_it_exists(file: str, name: str):
    tree = ast.parse((ROOT / file).read_text())
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert name in {node.name for node in tree.body if isinstance(node, definitions)}


def test_configuration_keys_exist():
    """A key that the page names is one of the example files, which have every key of the schema."""
    examples = "".join((ROOT / "configs" / f"{role}.yaml").read_text() for role in ("prefill", "decode", "bootstrap"))
    named = re.findall(r"`(?:http|timeouts|control\.curve|directory|integrity|transports\.mooncake)\.([a-z_]+)`", PAGE)
    assert named
    assert [key for key in named if not re.search(rf"^ *{key}:", examples, re.MULTILINE)] == []
