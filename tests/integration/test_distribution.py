"""Wheel and source distribution: what is in them, what they say of themselves, and that they run where no checkout is."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import readme_renderer.markdown
from packaging.metadata import Metadata
from trove_classifiers import classifiers

from deploy.grafana.build import BOARDS
from kvbridge import __version__
from kvbridge.processes import ChildProcess, wait_for

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
    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    @property
    def share(self) -> Path:
        """Where the wheel's data files are."""
        return self.folder / "share" / "kvbridge"

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        """Run a command to its end and return what it printed; `cwd` is not to be the checkout."""
        return _run(self.program(program), *arguments, cwd=cwd)


def install(wheel: Path, folder: Path) -> Installed:
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
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=stranger_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


def metadata(wheel: Path) -> bytes:
    return contents(wheel)[f"kvbridge-{__version__}.dist-info/METADATA"]


def sources() -> set[str]:
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


def test_the_metadata_is_what_a_package_index_accepts(built: Distributions) -> None:
    parsed = Metadata.from_email(metadata(built.wheel), validate=True)
    assert str(parsed.version) == __version__
    assert parsed.license_expression == "Apache-2.0"
    assert parsed.description_content_type == "text/markdown"
    assert {"engine", "cpu", "cuda", "redis", "demo"} <= set(parsed.provides_extra or ())
    assert parsed.classifiers
    assert set(parsed.classifiers) <= classifiers
    assert not parsed.project_urls, "no address is ours yet"
    page = readme_renderer.markdown.render(parsed.description)
    assert page, "an index would show the source of the README instead"
    assert re.search("<h1[^>]*>kvbridge", page)


def test_a_release_has_all_its_files_and_their_checksums(tmp_path: Path) -> None:
    source = copy_checkout(tmp_path / "source")
    shutil.copytree(ROOT / "docker", source / "docker")
    shutil.copy(ROOT / ".dockerignore", source)
    _run(sys.executable, "-m", "deploy.release", str(tmp_path / "out"), cwd=source)
    name = f"kvbridge-{__version__}"
    ends = ("-chart.tgz", "-changes.md", "-image.tar.gz", "-py3-none-any.whl", ".tar.gz")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"SHA256SUMS", *(name + end for end in ends)}
    said = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=False)
    assert said.returncode == 0
    assert (tmp_path / "out" / f"{name}-changes.md").read_text().startswith(f"## [{__version__}]")
    with tarfile.open(tmp_path / "out" / f"{name}-image.tar.gz") as context:
        names = set(context.getnames())
    copied = [
        each
        for line in re.findall(r"^COPY (docker/.*) /", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
        for each in line.split()
    ]
    assert {*copied, "kvbridge/__init__.py", "pyproject.toml", "docker/engine.Dockerfile"} <= names
    with tarfile.open(tmp_path / "out" / f"{name}-chart.tgz") as chart:
        assert {"kvbridge/Chart.yaml", "kvbridge/files/alerts.yaml", "kvbridge/files/redis/redis.sh"} <= set(
            chart.getnames()
        )


@pytest.mark.parametrize("program", ["bootstrap", "router"])
def test_daemons_start_from_the_wheel_alone(installed: Installed, tmp_path: Path, program: str) -> None:
    options = {"bootstrap": (), "router": ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")}[
        program
    ]
    command = [installed.program("kvbridge"), program, "--set", "http.port=0", *options]
    process = ChildProcess(program, tmp_path / "log")
    process.launch(command, environment={"PYTHONPATH": ""})

    def url() -> str | None:
        found = re.search(r'"http": "([^"]+)"', process.log())
        return found[1] if found else None

    try:
        found = wait_for("its address", url, timeout_s=60, watched=[process])
        assert httpx.get(f"{found}/health", timeout=30).status_code == 200
    finally:
        process.stop()


def test_it_runs_from_the_wheel_alone(installed: Installed, tmp_path: Path) -> None:
    where = "import importlib.metadata as m, kvbridge; print(kvbridge.__file__, m.version('kvbridge'))"
    file, version = installed.run("python", "-c", where, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.folder)
    assert version == __version__ == installed.run("kvbridge", "--version", cwd=tmp_path).strip()
    assert importlib.metadata.version("kvbridge") == __version__
