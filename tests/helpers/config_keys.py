"""Every key that a configuration can have, by its dotted path, from the schemas that are published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "configs"


def known_keys() -> set[str]:
    """Return the keys of all roles, also of sections that are null by default."""
    found: set[str] = set()
    for role in ("bootstrap", "prefill", "decode", "router"):
        schema = json.loads((CONFIGS / f"{role}.schema.json").read_text())
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
