"""The architecture page names the layers that the import linter keeps, and files that exist."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "kvbridge" / "ARCHITECTURE.md").read_text()


def test_the_table_of_layers_is_the_one_that_is_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    checked = [package for layer in layers for package in layer.split(" | ")]
    assert re.findall(r"^\| `(\w+)` \|", PAGE.split("## Layers")[1], re.MULTILINE) == checked


def test_the_files_that_it_names_exist():
    named = set(re.findall(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.(?:py|cu))?)`", PAGE))
    assert len(named) > 30
    roots = (ROOT / "kvbridge", ROOT, *(ROOT / "kvbridge").iterdir())
    assert not [name for name in named if not any((root / name).exists() for root in roots)]


def test_the_modules_that_the_image_is_tried_with_exist():
    named = re.findall(r'"(kvbridge\.[\w.]+)"', (ROOT / "docker" / "build.sh").read_text())
    assert named
    assert not [name for name in named if find_spec(name) is None]
