"""RFC 9457 problem bodies, in both directions.

`code` is the stable code of `kvbridge.core.errors` and what a program matches on; `type` is the same as a URN. A malformed request
answers 400 `invalid_input` and names each fault; it never answers 422.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kvbridge.core.errors import BridgeError, CapacityError, InvalidInputError, PeerError, errors_by_code
from kvbridge.core.ids import FrozenModel

log = structlog.get_logger(__name__)

PROBLEM_TYPE = "application/problem+json"
MAX_FAULTS = 20
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
LONGEST_RETRY_S = 1e6

FORESEEN = (BridgeError, RequestValidationError, HTTPException)
_STATUS_CODES = {
    400: InvalidInputError.code,
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


class Problem(FrozenModel):
    """An error as the API shows it."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str
    """Path of the request."""
    retry_after_s: Annotated[float, Field(ge=0, le=LONGEST_RETRY_S, allow_inf_nan=False)] | None = None
    """Only when trying again can help: a hint in seconds, exact where Retry-After is whole seconds."""


def problem_of(error: BridgeError, path: str) -> Problem:
    """Describe a deliberate error."""
    retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else None
    return make_problem(error.code, error.http_status, str(error), path=path, retry_after_s=retry_after_s)


def make_problem(code: str, status: int, detail: str, *, path: str, retry_after_s: float | None = None) -> Problem:
    """Build a problem; type and title follow from the code."""
    return Problem(
        type=f"urn:kvbridge:problem:{code}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        detail=detail,
        code=code,
        instance=path,
        retry_after_s=retry_after_s,
    )


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Turn a problem into a response, with Retry-After where it has one."""
    all_headers = dict(headers or {})
    if problem.retry_after_s is not None:
        all_headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=problem.status, headers=all_headers, media_type=PROBLEM_TYPE)


def install_problem_handlers(app: FastAPI) -> None:
    """Make every foreseen error a problem; the others are the business of `UnhandledErrors`."""
    for kind in FORESEEN:
        app.add_exception_handler(kind, answer_error)


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the problem that a foreseen error is."""
    if isinstance(error, BridgeError):
        return _answer_bridge_error(request, error)
    if isinstance(error, RequestValidationError):
        return _answer_validation_error(request, error)
    assert isinstance(error, HTTPException)
    return _answer_http_error(request, error)


def _answer_bridge_error(request: Request, error: BridgeError) -> Response:
    """Answer a deliberate error; one that nobody but this process can have caused is logged."""
    if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("request_failed", path=request.url.path, code=error.code, exc_info=error)
    return problem_response(problem_of(error, request.url.path))


def _answer_validation_error(request: Request, error: RequestValidationError) -> Response:
    faults = [_fault(found) for found in error.errors()]
    shown = "; ".join(faults[:MAX_FAULTS])
    if len(faults) > MAX_FAULTS:
        shown += f"; and {len(faults) - MAX_FAULTS} more"
    problem = make_problem(InvalidInputError.code, InvalidInputError.http_status, shown, path=request.url.path)
    return problem_response(problem)


def _fault(found: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in found["loc"])
    if found["type"] == "json_invalid":
        return f"body: not valid JSON: {found['ctx']['error']}"
    if found["type"] == "extra_forbidden" and found["loc"][-1] == "prefix_tokens":
        return f"{where}: unknown field; what decode holds of a prompt already, its node learns from its engine only"
    value = found.get("input")
    got = f", got {value!r}" if isinstance(value, (str, int, float)) and len(str(value)) <= 80 else ""
    return f"{where}: {str(found['msg']).removeprefix('Value error, ')}{got}"


def _answer_http_error(request: Request, error: HTTPException) -> Response:
    code = _STATUS_CODES.get(error.status_code, "http_error")
    detail = str(error.detail)
    if code == "not_found":
        detail = f"no route {request.url.path}; see /openapi.json"
    if code == "method_not_allowed":
        detail = f"{request.method} is not allowed on {request.url.path}"
        error.headers = {"Allow": ", ".join(_allowed(request))}
    problem = make_problem(code, error.status_code, detail, path=request.url.path)
    return problem_response(problem, error.headers)


def _allowed(request: Request) -> list[str]:
    """The methods of all routes of a path: the framework names those of the first one only."""
    return [method for method in METHODS if _takes(request, method)]


def _takes(request: Request, method: str) -> bool:
    asked = {**request.scope, "method": method}
    return any(route.matches(asked)[0] is Match.FULL for route in request.app.routes)


def error_of(status: int, body: bytes, *, source: str) -> BridgeError:
    """Return the error that a problem body describes, as its own class; `source` is who answered.

    A body that is no problem, a code that this release does not know and a failure inside the other process become
    PeerError. Errors keep their codes over any number of hops.
    """
    try:
        problem = Problem.model_validate_json(body, extra="ignore")  # what a later release adds is ignored
    except ValueError:
        return PeerError(f"{source} answered {status} without a problem body: {body[:200]!r}")
    kind = errors_by_code().get(problem.code)
    if kind is None or kind.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return PeerError(f"{source} answered {status} {problem.code}: {problem.detail}")
    if issubclass(kind, CapacityError):
        return kind(problem.detail, retry_after_s=problem.retry_after_s or 1.0)
    return kind(problem.detail)
