"""Commands with many options: a dataclass says what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

OptionsT = TypeVar("OptionsT")


def with_options(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Make a command of a function that takes its options, a dataclass."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(action: Callable[[OptionsT], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401 - what typer has parsed
            action(options(**given))

        command.__doc__ = action.__doc__
        command.__annotations__ = hints
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
