"""The documentation as a site: it builds, no link is broken, and the guide for engines has the whole public API."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PUBLIC = ("kvbridge.engine", "kvbridge.sparse")
BUILD_S = 200


@pytest.mark.thorough
@pytest.mark.timeout(BUILD_S + 40)
def test_the_site_builds_without_a_warning_and_has_the_public_api(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stderr
    guide = (tmp_path / "site" / "engines" / "index.html").read_text()
    missing = [name for package in PUBLIC for name in documented(package) if f'id="{name}"' not in guide]
    assert not missing


def documented(package: str) -> list[str]:
    """Every public name, and the methods that a public class defines itself."""
    module = importlib.import_module(package)
    found = []
    for name in module.__all__:
        each = getattr(module, name)
        found.append(f"{package}.{name}")
        if inspect.isclass(each):
            members = (key for key, what in vars(each).items() if inspect.isfunction(what) and not key.startswith("_"))
            found += [f"{package}.{name}.{member}" for member in members]
    return found
