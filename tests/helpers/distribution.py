"""The distributions as a stranger gets them: built, and installed where nothing of the checkout is seen.

Owns: the copy that they are built from, the builds, the fresh environment. Must not know: what has to be in them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120
_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
_PARTS = ("kvbridge", "examples", "configs", "deploy", "docs", "tests")
"""Folders of the checkout that are copied; what is not to be published among them, so that a build could take it by mistake."""


def copy_checkout(folder: Path) -> Path:
    """Copy what a build looks at: setuptools leaves its work beside the sources."""
    for part in _PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=_CACHES)
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, folder)
    return folder


def build(*arguments: str) -> None:
    """Run `python -m build` with the setuptools that is here; nothing is downloaded."""
    _run(sys.executable, "-m", "build", "--no-isolation", *arguments)


@dataclass(frozen=True)
class Installed:
    """An environment that has kvbridge from a wheel, and its dependencies from the one that the tests run in."""

    folder: Path

    def program(self, name: str) -> str:
        """The path of a command."""
        return str(self.folder / "bin" / name)

    @property
    def share(self) -> Path:
        """Where the wheel's data files are."""
        return self.folder / "share" / "kvbridge"

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        """Run a command to its end and return what it printed; `cwd` is not to be the checkout."""
        return _run(self.program(program), *arguments, cwd=cwd)


def install(wheel: Path, folder: Path) -> Installed:
    """Install a wheel into a fresh virtual environment."""
    venv.create(folder, with_pip=False, symlinks=True)
    made = Installed(folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", made.program("python")]
    _run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    # A folder that a .pth names is searched last, and its own .pth files, one of which leads to the checkout, are not read.
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shared = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(shared) + "\n")
    return made


def stranger_environment() -> dict[str, str]:
    """The environment of somebody who has no checkout."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=stranger_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
