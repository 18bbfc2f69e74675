"""The files in `configs/`: what `kvbridge init --complete` writes. `python -m tests.helpers.example_configs` writes them again."""

from __future__ import annotations

from pathlib import Path

from kvbridge.cli.initial import InitialCluster
from kvbridge.config.pools import ModelConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def example_configs() -> dict[str, str]:
    """Return what is to be in each file."""
    cluster = InitialCluster(folder="configs", runtime="/tmp/kvbridge-", model=ModelConfig(preset="tiny-v4"))
    return {name: _named_schema(name) + text for name, text in cluster.files(complete=True).items()}


def _named_schema(name: str) -> str:
    """For editors: the schema is beside the file."""
    return f"# yaml-language-server: $schema={name.removesuffix('.yaml')}.schema.json\n"


if __name__ == "__main__":
    for name, text in example_configs().items():
        (CONFIGS / name).write_text(text)
