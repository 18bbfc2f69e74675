"""The files in `configs/`: what `kvbridge init --complete` writes. `python -m tests.helpers.example_configs` writes them again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbridge.cli.config import ROLES
from kvbridge.cli.init import InitialCluster
from kvbridge.config.pools import ModelConfig

CONFIGS = Path(__file__).parents[2] / "configs"


def example_configs() -> dict[str, str]:
    cluster = InitialCluster(folder="configs", runtime="/tmp/kvbridge-", model=ModelConfig(preset="tiny-v4"))
    return cluster.files(complete=True)


def known_keys() -> set[str]:
    found: set[str] = set()
    for kind in ROLES.values():
        schema = kind.model_json_schema()
        found |= set(_keys(schema, schema["$defs"], ""))
    return found


def _keys(part: dict[str, Any], definitions: dict[str, Any], above: str) -> Iterator[str]:
    if "$ref" in part:
        yield from _keys(definitions[part["$ref"].rpartition("/")[2]], definitions, above)
    for each in (*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())):
        yield from _keys(each, definitions, above)
    for name, below in part.get("properties", {}).items():
        yield f"{above}{name}"
        yield from _keys(below, definitions, f"{above}{name}.")


if __name__ == "__main__":
    for name, text in example_configs().items():
        (CONFIGS / name).write_text(text)
