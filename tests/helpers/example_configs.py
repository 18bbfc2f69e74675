"""The files in `configs/`: what `kvbridge init --complete` writes. `python -m tests.helpers.example_configs` writes them again."""

from __future__ import annotations

from pathlib import Path

from kvbridge.cli.init import InitialCluster
from kvbridge.config.pools import ModelConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def example_configs() -> dict[str, str]:
    """Return what is to be in each file."""
    cluster = InitialCluster(folder="configs", runtime="/tmp/kvbridge-", model=ModelConfig(preset="tiny-v4"))
    return cluster.files(complete=True)


if __name__ == "__main__":
    for name, text in example_configs().items():
        (CONFIGS / name).write_text(text)
