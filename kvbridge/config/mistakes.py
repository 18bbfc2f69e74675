"""A configuration mistake in words: one line for each, with path, what is wrong, the value, where it came from."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from datetime import date

from pydantic import BaseModel, SecretStr, ValidationError

KeyPath = tuple[str, ...]

LONGEST_VALUE = 80
LONGEST_PLAIN = 24
_ADDRESSES = ("tcp://", "ipc://", "http://", "https://")
_SOUNDS_SECRET = re.compile(r"token|secret|key|passw|credential", re.IGNORECASE)
"""Keys whose value may be a secret, or one that was put into the wrong place: it is not shown."""
_COUNTS_TOKENS = re.compile(r"tokens(_per_\w+)?$", re.IGNORECASE)

_Sections = list[tuple[str, type[BaseModel] | None]]


def describe(error: ValidationError, kind: type[BaseModel], origins: Mapping[KeyPath, str]) -> list[str]:
    """Return one line for each mistake that pydantic found in data whose leaves came from `origins`."""
    lines: list[str] = []
    for found in error.errors(include_url=False):
        sections = _sections(kind, found["loc"])
        path = tuple(key for key, _ in sections)
        name = ".".join(path)
        if found["type"] == "extra_forbidden":
            lines.append(f"{name}: {_unknown_key(sections)}{_origin(path, origins)}")
        elif found["type"] == "union_tag_invalid":
            expected = found["ctx"]["expected_tags"].replace("'", "")
            lines.append(f"{name}.kind: one of {expected}{_origin((*path, 'kind'), origins)}")
        elif found["type"] == "missing":
            lines.append(f"{name}: is required and has no default")
        else:
            for text in found["msg"].removeprefix("Value error, ").split("\n"):
                what = f"{name}: {text}" if name else text
                is_bare = found["type"] == "string_type" and isinstance(found["input"], (int, float, date))
                hint = "; put it in quotes" if is_bare else ""
                lines.append(f"{what}{_value(found['input'], sections)}{hint}{_origin(path, origins)}")
    return lines


def _sections(kind: type[BaseModel], place: tuple[str | int, ...]) -> _Sections:
    """Return each key of a place, with the section that the key stands in; None below what is no section.

    pydantic puts the kind of a section behind the key of a section of several kinds; a file has no such key.
    """
    found: _Sections = []
    choices: list[type[BaseModel]] = [kind]
    for part in place:
        kinds = {model.model_fields["kind"].default: model for model in choices} if len(choices) > 1 else {}
        if part in kinds:
            choices = [kinds[part]]
            continue
        section = choices[0] if choices else None
        found.append((str(part), section))
        if isinstance(part, str):  # a number stands for one of several sections of a kind
            field = section.model_fields.get(part) if section is not None else None
            choices = [] if field is None else list(_models(field.annotation))
    return found


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models(part)


def _unknown_key(sections: _Sections) -> str:
    """Say that the last key does not exist, and which one may have been meant."""
    *above, (key, section) = sections
    close = difflib.get_close_matches(key, section.model_fields if section is not None else (), n=1)
    where = f"'{'.'.join(name for name, _ in above)}' has" if above else "there is"
    return f"unknown key, {where} no '{key}'" + (f"; did you mean '{close[0]}'?" if close else "")


def _value(value: object, sections: _Sections) -> str:
    """Show scalars only: a mapping can hold a secret, and is printed by nobody who looks for one wrong key."""
    if isinstance(value, (BaseModel, Mapping)) or not sections:
        return ""
    if _is_secret(sections) or not _is_plain(value):
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


def _is_secret(sections: _Sections) -> bool:
    if any(_SOUNDS_SECRET.search(key) and not _COUNTS_TOKENS.search(key) for key, _ in sections):
        return True
    fields = [section.model_fields.get(key) for key, section in sections if section is not None]
    return any(
        field is not None and SecretStr in (field.annotation, *typing.get_args(field.annotation)) for field in fields
    )


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Name the source of the key, or of the list that holds it, or of all keys of the section."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f" (from {origins[path[:length]]})"
    below = sorted({origin for key, origin in origins.items() if path and key[: len(path)] == path})
    return f" (from {', '.join(below)})" if below else ""
