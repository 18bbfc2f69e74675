"""How the endpoints describe themselves: what an operation may answer besides its result, and who may call it.

Owns: the responses for errors, headers, names of operations, the token scheme. Must not know: what routes do.

Every error that an operation can answer is declared, by its class: a client that is generated from the description has them
all, and a test holds what daemons answer against it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from kvbridge.core.errors import BridgeError, CapacityError, InvalidInputError, UnauthorizedError
from kvbridge.http.problems import PROBLEM_TYPE, Problem, make_problem

Responses = dict[int | str, dict[str, Any]]

TOKEN_SCHEME = "bearer"  # noqa: S105 - the name of a scheme, no secret


def _header(description: str, kind: str) -> dict[str, Any]:
    return {"description": description, "required": True, "schema": {"type": kind}}


LOCATION = {"Location": _header("The path of what was made.", "string")}
RETRY_AFTER = {"Retry-After": _header("When to try again, in whole seconds.", "integer")}
WWW_AUTHENTICATE = {"WWW-Authenticate": _header("The scheme of the token that is needed.", "string")}


def operation_id(route: APIRoute) -> str:
    """Name an operation as its function, which is what a generated client calls its own."""
    return route.name


def problems(*kinds: type[BridgeError], body: bool = False) -> Responses:
    """Return what an operation answers that can raise these errors, besides those that every operation can.

    `body`: it takes one, which may be too long.
    """
    by_status: dict[int, list[type[BridgeError]]] = {}
    errors: tuple[type[BridgeError], ...] = (UnauthorizedError, BridgeError, *kinds)
    for kind in dict.fromkeys(errors):
        by_status.setdefault(kind.http_status, []).append(kind)
    found: Responses = {status: _problem(status, of_status) for status, of_status in sorted(by_status.items())}
    if body:
        found[413] = _described("The body is longer than `http.max_body_bytes`.", {})
    return found


def _problem(status: int, kinds: Iterable[type[BridgeError]]) -> dict[str, Any]:
    examples: dict[str, Any] = {}
    headers: dict[str, Any] = {}
    texts = []
    for kind in kinds:
        meaning = _MEANINGS.get(kind) or inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
        texts.append(f"`{kind.code}`: {meaning}")
        retry_after_s = 1.5 if issubclass(kind, CapacityError) else None
        example = make_problem(kind.code, status, meaning, path="/v1/requests", retry_after_s=retry_after_s)
        examples[kind.code] = {"value": example.model_dump(exclude_none=True)}
        if issubclass(kind, CapacityError):
            headers |= RETRY_AFTER
        if kind is UnauthorizedError:
            headers |= WWW_AUTHENTICATE
    answer = _described("\n\n".join(texts), examples)
    return answer | ({"headers": headers} if headers else {})


_MEANINGS: dict[type[BridgeError], str] = {
    BridgeError: "Something in this process is wrong that it did not foresee; its log says more.",
    InvalidInputError: "What was sent can never work; the detail names each fault.",
}


def _described(description: str, examples: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        "description": description,
        "content": {PROBLEM_TYPE: content | ({"examples": examples} if examples else {})},
    }


def _without_422(schema: dict[str, Any]) -> None:
    """Take away what FastAPI promises of malformed requests: they are answered as every other error is, with 400."""
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    for operation in (each for path in schema["paths"].values() for each in path.values()):
        operation["responses"].pop("422", None)


def describe(app: FastAPI, *, token: bool, open_paths: Iterable[str]) -> dict[str, Any]:
    """Return an application's description. `token`: whether callers have to show one, except at the open paths."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    _without_422(schema)
    components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema(
        ref_template="#/components/schemas/{model}"
    )
    scheme = {"type": "http", "scheme": "bearer", "description": "The line of `http.token_file`, where there is one."}
    components["securitySchemes"] = {TOKEN_SCHEME: scheme}
    schema["security"] = [{TOKEN_SCHEME: []}] if token else [{}, {TOKEN_SCHEME: []}]
    for path in open_paths:
        for operation in schema["paths"].get(path, {}).values():
            operation["security"] = []
            operation["responses"].pop("401")
    return schema
