"""Errors of routes as problem responses. A malformed request answers 400 `invalid_input` with each fault, never 422."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kvbridge.api.problems import PROBLEM_TYPE, Problem, make_problem, problem_of
from kvbridge.core.errors import BridgeError, InvalidInputError

log = structlog.get_logger(__name__)

MAX_FAULTS = 20
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
_STATUS_CODES = {
    400: InvalidInputError.code,
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Turn a problem into a response, with Retry-After where it has one."""
    all_headers = dict(headers or {})
    if problem.retry_after_s is not None:
        all_headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=problem.status, headers=all_headers, media_type=PROBLEM_TYPE)


async def _answer_bridge_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BridgeError)
    if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("request_failed", path=request.url.path, code=error.code, exc_info=error)
    return problem_response(problem_of(error, request.url.path))


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [_fault(found) for found in error.errors()]
    shown = "; ".join(faults[:MAX_FAULTS])
    if len(faults) > MAX_FAULTS:
        shown += f"; and {len(faults) - MAX_FAULTS} more"
    return problem_response(problem_of(InvalidInputError(shown), request.url.path))


def _fault(found: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in found["loc"])
    if found["type"] == "json_invalid":
        return f"body: not valid JSON: {found['ctx']['error']}"
    if found["type"] == "extra_forbidden" and found["loc"][-1] == "prefix_tokens":
        return f"{where}: unknown field; what decode holds of a prompt already, its node learns from its engine only"
    value = found.get("input")
    got = f", got {value!r}" if isinstance(value, (str, int, float)) and len(str(value)) <= 80 else ""
    return f"{where}: {str(found['msg']).removeprefix('Value error, ')}{got}"


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, code, headers = request.url.path, _STATUS_CODES.get(error.status_code, "http_error"), error.headers
    detail = str(error.detail)
    if code == "not_found":
        detail = f"no route {path}; see /openapi.json"
    if code == "method_not_allowed":
        detail = f"{request.method} is not allowed on {path}"
        headers = {"Allow": ", ".join(method for method in METHODS if _takes(request, method))}
    return problem_response(make_problem(code, error.status_code, detail, path=path), headers)


def _takes(request: Request, method: str) -> bool:
    """Return whether any route of the path takes a method: the framework looks at the first route only."""
    asked = {**request.scope, "method": method}
    return any(route.matches(asked)[0] is Match.FULL for route in request.app.routes)


FORESEEN: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    BridgeError: _answer_bridge_error,
    RequestValidationError: _answer_validation_error,
    HTTPException: _answer_http_error,
}
"""The errors that are problems; `Entrance` answers the others."""


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the problem that a foreseen error is."""
    return await next(answer for kind, answer in FORESEEN.items() if isinstance(error, kind))(request, error)
