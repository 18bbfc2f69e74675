"""YAML files as data with line numbers.

Owns: reading, duplicate keys, the line of each key. Must not know: the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbridge.core.errors import ConfigError

KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A file's content, and the line (from 1) on which each key stands."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]


def read_document(path: Path) -> Document:
    """Read a YAML mapping. Raises ConfigError for a file that is missing, is no mapping or repeats a key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return Document(path, {}, {})
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected a mapping of keys at the top, got something else")
        lines: dict[KeyPath, int] = {}
        _collect(root, (), lines, path)
        return Document(path, loader.construct_document(root), lines)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid YAML: {what_is_wrong(error)}") from None
    finally:
        loader.dispose()


def what_is_wrong(error: Exception) -> str:
    """Say what a YAML error says, without the text around it: that may be a secret."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{getattr(error, 'problem', None) or 'a value cannot be read'}"


def _collect(node: yaml.MappingNode, above: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    for key, value in node.value:
        here = (*above, str(key.value))
        line = key.start_mark.line + 1
        if here in lines:
            raise ConfigError(f"{path} line {line}: {'.'.join(here)} is set twice, first on line {lines[here]}")
        lines[here] = line
        if isinstance(value, yaml.MappingNode):
            _collect(value, here, lines, path)
