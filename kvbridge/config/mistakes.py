"""A configuration mistake in words.

Owns: one line for each mistake: path, what is wrong, the value, where it came from; or that the file is another daemon's.
Must not know: how sources are read.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from kvbridge.config.documents import Document, KeyPath

LONGEST_VALUE = 80
LONGEST_PLAIN = 24
_ADDRESSES = ("tcp://", "ipc://", "http://", "https://")
_SOUNDS_SECRET = re.compile(r"token|secret|key|passw|credential", re.IGNORECASE)
"""Keys whose value may be a secret, or one that was put into the wrong place: it is not shown."""
_COUNTS_TOKENS = re.compile(r"tokens(_per_\w+)?$", re.IGNORECASE)


def describe(error: ValidationError, kind: type[BaseModel], origins: Mapping[KeyPath, str]) -> list[str]:
    """Return one line for each mistake that pydantic found in data whose leaves came from `origins`."""
    lines: list[str] = []
    for found in error.errors(include_url=False, include_context=False):
        path, variant = _without_tag(kind, tuple(str(part) for part in found["loc"]))
        name = ".".join(path)
        if found["type"] == "extra_forbidden":
            unknown = unknown_key(kind, path) if variant is None else _unknown_of_variant(variant, path)
            lines.append(f"{name}: {unknown}{_origin(path, origins)}")
        elif found["type"] == "union_tag_invalid":
            tags = ", ".join(_variants(kind, path))
            lines.append(f"{name}.kind: one of {tags}{_origin((*path, 'kind'), origins)}")
        elif found["type"] == "missing":
            lines.append(f"{name}: is required and has no default")
        else:
            for text in found["msg"].removeprefix("Value error, ").split("\n"):
                what = f"{name}: {text}" if name else text
                is_bare = found["type"] == "string_type" and isinstance(found["input"], (int, float, date))
                hint = "; put it in quotes" if is_bare else ""
                lines.append(f"{what}{_value(found['input'], kind, path)}{hint}{_origin(path, origins)}")
    return lines


def unknown_key(kind: type[BaseModel], path: KeyPath) -> str:
    """Say that a key does not exist, and which one may have been meant."""
    for depth, (key, section) in enumerate(zip(path, _sections(kind, path), strict=False)):
        if section is None or key not in section.model_fields:
            known = list(section.model_fields) if section is not None else []
            close = difflib.get_close_matches(key, known, n=1)
            where = f"'{'.'.join(path[:depth])}' has" if depth else "there is"
            return f"unknown key, {where} no '{key}'" + (f"; did you mean '{close[0]}'?" if close else "")
    return "cannot be set this way"


def _unknown_of_variant(variant: type[BaseModel], path: KeyPath) -> str:
    close = difflib.get_close_matches(path[-1], variant.model_fields, n=1)
    said = f"unknown key, '{'.'.join(path[:-1])}' of this kind has no '{path[-1]}'"
    return said + (f"; did you mean '{close[0]}'?" if close else "")


def _without_tag(kind: type[BaseModel], path: KeyPath) -> tuple[KeyPath, type[BaseModel] | None]:
    """Return the path as a file has it, without the kind that pydantic puts behind a section of several kinds, and that kind."""
    for depth in range(1, len(path)):
        variant = _variants(kind, path[:depth]).get(path[depth])
        if variant is not None:
            return path[:depth] + path[depth + 1 :], variant
    return path, None


def _variants(kind: type[BaseModel], path: KeyPath) -> dict[str, type[BaseModel]]:
    """The models that a section can be, by their `kind`; empty for one that can be one thing only."""
    section = list(_sections(kind, path))[-1]
    field = section.model_fields.get(path[-1]) if section is not None else None
    models = [] if field is None else list(_models(field.annotation))
    return {model.model_fields["kind"].default: model for model in models} if len(models) > 1 else {}


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def in_view_of_roles(
    mistakes: list[str], kind: type[BaseModel], file: Document, roles: Mapping[str, type[BaseModel]]
) -> list[str]:
    """Return the mistakes of a file; when it was written for another of the roles, that one line in their place."""
    if _is_valid(kind, file.values):
        return mistakes  # they came from elsewhere
    ours = next(name for name, schema in roles.items() if schema is kind)
    others = {name: schema for name, schema in roles.items() if schema is not kind}
    foreign = _unknown_keys(kind, file.values)
    if foreign:
        others = {name: schema for name, schema in others.items() if not _unknown_keys(schema, file.values)}
    valid = [name for name, schema in others.items() if file.values and _is_valid(schema, file.values)]
    names = " or ".join(valid or (others if foreign else ()))
    if not names:
        return mistakes
    if not foreign:
        return [*mistakes, f"{file.path}: as it stands, this is a valid {names} configuration"]
    some = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
    return [f"{file.path}: this is a {names} configuration, not one of {ours}, which does not have {some}"]


def _unknown_keys(kind: type[BaseModel], values: Mapping[str, Any], above: KeyPath = ()) -> list[str]:
    found = []
    for key, value in values.items():
        path = (*above, str(key))
        section = list(_sections(kind, path))[-1]
        if section is not None and key not in section.model_fields:
            found.append(".".join(path))
        elif section is not None and isinstance(value, Mapping):
            found += _unknown_keys(kind, value, path)
    return found


def _is_valid(kind: type[BaseModel], values: Mapping[str, Any]) -> bool:
    try:
        kind.model_validate(values)
    except ValidationError:
        return False
    return True


def _sections(kind: type[BaseModel], path: KeyPath) -> Iterator[type[BaseModel] | None]:
    """For each key the section that it stands in, also one that may be null; None below what is no section."""
    section: type[BaseModel] | None = kind
    for key in path:
        yield section
        field = section.model_fields.get(key) if section is not None else None
        kinds = typing.get_args(field.annotation) or (field.annotation,) if field is not None else ()
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _value(value: object, kind: type[BaseModel], path: KeyPath) -> str:
    """Show scalars only: a mapping can hold a secret, and is printed by nobody who looks for one wrong key."""
    if isinstance(value, (BaseModel, Mapping)) or not path:
        return ""
    if _is_secret(kind, path) or not _is_plain(value):
        return ", got a value that is not shown"
    text = repr(value)
    return f", got {text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + '...'}"


def _is_plain(value: object) -> bool:
    """Whether a value is certainly no token or key that was put under the wrong name: these are long, and may begin like a path."""
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return False
    return not isinstance(value, str) or len(value) < LONGEST_PLAIN or value.startswith(_ADDRESSES)


def _is_secret(kind: type[BaseModel], path: KeyPath) -> bool:
    if any(_SOUNDS_SECRET.search(key) and not _COUNTS_TOKENS.search(key) for key in path):
        return True
    for key, section in zip(path, _sections(kind, path), strict=False):
        field = section.model_fields.get(key) if section is not None else None
        if field is not None and (field.annotation is SecretStr or SecretStr in typing.get_args(field.annotation)):
            return True
    return False


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Name the source of the key, or of the list that holds it, or of all keys of the section."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" (from {origins[path[:length]]})"
    below = sorted({origin for key, origin in origins.items() if path and key[: len(path)] == path})
    return f" (from {', '.join(below)})" if below else ""
