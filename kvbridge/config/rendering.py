"""A configuration as a commented YAML file: every key under its docstring in the schema, its unit and its default."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from kvbridge.core.ids import field_docs

WIDTH = 120
UNBROKEN = "\u00a0"
"""A space at which no line is broken."""
UNITS = {"_s": "seconds", "_bytes": "bytes", "_us": "microseconds"}
"""Unit of a value by the end of its key."""


def render_commented(config: BaseModel, *, top: str, complete: bool) -> str:
    """Return a configuration as YAML with comments, `top` first. Secrets are blanked.

    `complete`: every key, else those that were set.
    """
    return "\n".join([*_comment(top, 0), *_section(config, 0, complete=complete)]) + "\n"


def _section(config: BaseModel, depth: int, *, complete: bool) -> Iterator[str]:
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if not complete and name not in config.model_fields_set:
            continue
        if not depth:
            yield ""
        if isinstance(value, BaseModel):
            yield from _comment(field_docs(type(config)).get(name) or " ".join((value.__doc__ or "").split()), depth)
            yield f"{'  ' * depth}{name}:"
            yield from _section(value, depth + 1, complete=complete)
            continue
        yield from _comment(describe_field(type(config), name), depth)
        if value is None:
            yield from _optional_section(field, depth)
        unset = field.default_factory_takes_validated_data and name not in config.model_fields_set
        yield f"{'  ' * depth}{'# ' if unset else ''}{name}: {_plain(value)}"


def describe_field(kind: type[BaseModel], name: str) -> str:
    """Return a field's docstring with its choices, unit and default."""
    field, text = kind.model_fields[name], field_docs(kind).get(name, "")
    choices = [choice.value for choice in _choices(field.annotation)]
    if not all(choice in text for choice in choices):
        text = f"{text} One of {', '.join(choices)}.".strip()
    facts = [unit for ending, unit in UNITS.items() if name.endswith(ending)]
    if field.is_required():
        facts.append("required")
    elif not field.default_factory_takes_validated_data:
        facts.append(f"default{UNBROKEN}{_plain(field.get_default(call_default_factory=True))}")
    return f"{text} ({', '.join(facts)})" if facts else text


def _optional_section(field: FieldInfo, depth: int) -> Iterator[str]:
    """Yield the keys of a section that is null, as comments."""
    for kind in get_args(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _comment("These keys in place of null:", depth)
            for name in kind.model_fields:
                yield from _comment(f"{name}: {describe_field(kind, name)}", depth, indent="    ")


def _choices(annotation: Any) -> tuple[StrEnum, ...]:  # noqa: ANN401 - any type that a field may have
    """Return the values of the enumeration that an annotation is, may be, or is a sequence of."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return tuple(kind)
    return ()


def _comment(text: str, depth: int, indent: str = "") -> Iterator[str]:
    margin = "  " * depth + "#"
    for paragraph in text.split("\n"):
        lines = textwrap.wrap(paragraph, WIDTH - len(margin) - 1 - len(indent), break_on_hyphens=False) or [""]
        yield from (f"{margin} {indent}{line.replace(UNBROKEN, ' ')}".rstrip() for line in lines)


def _plain(value: Any) -> str:  # noqa: ANN401 - whatever a field holds
    value = to_jsonable_python(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value == "":
        return '""'
    dumped = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
