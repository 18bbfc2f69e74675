"""Numbers as the published description has them, what JSON does not write as a number being none; queries of described names only.

Owns: these rules for bodies, paths and queries. Must not know: what the numbers mean.

pydantic takes "1000" and true for numbers, which configuration needs (variables are texts) and the endpoints do not: a router that
sends them is wrong, and would learn it from another reader of the same description. JSON Schema calls 5.0 an integer.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, BeforeValidator, ValidationError

from kvbridge.core.errors import InvalidInputError

_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)


def _number(text: object) -> object:
    if not isinstance(text, str):
        return text  # the default
    if not _JSON_NUMBER.fullmatch(text):
        raise ValueError("Input should be a number as JSON writes it")
    return json.loads(text)


NUMBER = BeforeValidator(_number)
"""For a number in a path or a query."""


async def _described_names_only(request: Request) -> None:
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    unknown = sorted(request.query_params.keys() - {*known})
    if unknown:
        taken = f"known are {', '.join(known)}" if known else "there are none here"
        raise InvalidInputError(f"query.{unknown[0][:80]}: unknown parameter; {taken}")


DESCRIBED_QUERY = Depends(_described_names_only)
"""For a router: refuse parameters that a route does not have, as members of a body are, instead of doing without them."""


def as_described(kind: type[BaseModel]) -> Any:  # noqa: ANN401 - what FastAPI calls a dependency
    """For a route with a body of this kind: refuse members of another type than the description says."""

    async def check(request: Request) -> None:
        try:
            kind.model_validate_json(await request.body(), strict=True)
        except ValidationError as error:
            # What is no JSON, and what is wrong in itself, is FastAPI's to tell.
            faults = [
                fault for fault in error.errors(include_url=False) if _is_other_type(fault["type"], fault["input"])
            ]
            if faults:
                raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None

    return Depends(check)


def _is_other_type(fault: str, value: object) -> bool:
    whole = isinstance(value, float) and value.is_integer()
    return fault in {"int_type", "float_type", "bool_type", "string_type"} and not (fault == "int_type" and whole)
