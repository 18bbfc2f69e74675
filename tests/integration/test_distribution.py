"""Wheel and source distribution: what is in them, what they say of themselves, and that they run where no checkout is."""

from __future__ import annotations

import importlib.metadata
import re
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.grafana.build import BOARDS
from kvbridge import __version__
from tests.helpers.distribution import ROOT, Installed, build, copy_checkout, install

pytestmark = pytest.mark.thorough

SECRETS = (
    "kvbridge/control/node.key",
    "kvbridge/node.token",
    "examples/.env",
    "configs/decode.key",
    "deploy/prometheus/token",
)
"""Files that somebody could have lying about, put there before the build."""
DATA = {
    "examples": "examples/*.py",
    "configs": "configs/*.*",
    "prometheus": "deploy/prometheus/*.yaml",
    "docs": "docs/runbook.md",
}
"""Each folder of `share/kvbridge` and what it has of the checkout."""


@dataclass(frozen=True)
class Distributions:
    sdist: Path
    wheel: Path
    """Built from the source distribution."""
    wheel_of_checkout: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    source, folder = copy_checkout(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist")
    for name in SECRETS:
        (source / name).write_text("secret")
    build(str(source), "--outdir", str(folder))
    build("--wheel", str(source), "--outdir", str(folder / "direct"))
    (sdist,), (wheel,), (direct,) = folder.glob("*.tar.gz"), folder.glob("*.whl"), folder.glob("direct/*.whl")
    return Distributions(sdist, wheel, direct)


@pytest.fixture(scope="module")
def installed(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(built.wheel, tmp_path_factory.mktemp("environment") / "venv")


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def sources() -> set[str]:
    """Every file of the package."""
    files = (path for path in (ROOT / "kvbridge").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_the_wheel_has_every_file_of_the_package_and_what_is_used_beside_it(built: Distributions) -> None:
    within = set(contents(built.wheel))
    info, data = f"kvbridge-{__version__}.dist-info/", f"kvbridge-{__version__}.data/data/share/kvbridge/"
    assert {name for name in within if name.startswith("kvbridge/")} == sources()
    assert {name for name in within if name.startswith(data)} == {
        *(f"{data}{folder}/{path.name}" for folder, pattern in DATA.items() for path in ROOT.glob(pattern)),
        *(f"{data}grafana/{board.uid}.json" for board in BOARDS),
    }
    rest = {name for name in within if not name.startswith(("kvbridge/", data))}
    named = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert rest == {info + name for name in named}


def test_nothing_secret_and_no_test_is_in_either(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    for name in [*contents(built.wheel), *contents(built.wheel_of_checkout), *names]:
        assert not name.endswith(SECRETS), name
        assert not re.search(r"(^|/)(tests?|test_[^/]*)(/|$)", name), name
    assert "CHANGELOG.md" in names


def test_the_wheel_made_of_the_source_distribution_is_the_same(built: Distributions) -> None:
    assert contents(built.wheel) == contents(built.wheel_of_checkout)


def test_it_runs_from_the_wheel_alone(installed: Installed, tmp_path: Path) -> None:
    where = "import importlib.metadata as m, kvbridge; print(kvbridge.__file__, m.version('kvbridge'))"
    file, version = installed.run("python", "-c", where, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.folder)
    assert version == __version__ == installed.run("kvbridge", "--version", cwd=tmp_path).strip()
    assert importlib.metadata.version("kvbridge") == __version__
