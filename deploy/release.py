"""What a release consists of, in one folder: `python -m deploy.release OUT`, or `make release`.

Nothing is published. The folder is what people publish, or install from.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import helm_python as helm

from kvbridge import __version__

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ("kvbridge", "docker", "pyproject.toml", "README.md", "LICENSE", ".dockerignore")
"""Files that `docker build` needs."""


def changes(version: str) -> str:
    """Return the section of the changelog for a version."""
    found = re.search(
        rf"^## \[{re.escape(version)}\].*?(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section [{version}]")
    return found[0].strip() + "\n"


def write(folder: Path) -> None:
    """Write all files of this version to a new folder, with their checksums."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    name = f"kvbridge-{__version__}"
    (folder / f"{name}-changes.md").write_text(changes(__version__))
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True,
        stdout=sys.stderr,
    )
    with tarfile.open(folder / f"{name}-image.tar.gz", "w:gz") as context:
        for part in IMAGE:
            context.add(ROOT / part, part, filter=lambda each: None if "__pycache__" in each.name else each)
    chart = Path(helm.package(ROOT / "deploy" / "helm" / "kvbridge", destination=folder))
    chart.rename(folder / f"{name}-chart.tgz")
    sums = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir()))
    (folder / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(*(f"{file.stat().st_size:>12,}  {file}" for file in sorted(Path(sys.argv[1]).iterdir())), sep="\n")
