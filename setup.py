"""Makes the files of the wheel that are generated, in `build/`, where the data files of `pyproject.toml` name them."""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
if (ROOT / "deploy" / "grafana").is_dir():  # images are built without it
    sys.path.insert(0, str(ROOT))
    from deploy.grafana.build import write

    write(Path("build") / "grafana")
setup()
