"""RFC 9457 problem bodies, in both directions. `code` is the stable code of `kvbridge.core.errors`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from pydantic import Field

from kvbridge.core.errors import BridgeError, CapacityError, PeerError, errors_by_code
from kvbridge.core.ids import FrozenModel

PROBLEM_TYPE = "application/problem+json"
LONGEST_RETRY_S = 1e6


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
    """Seconds after which a retry may succeed (Retry-After: the same in whole seconds). None: a retry does not help."""


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


def problem_of(error: BridgeError, path: str) -> Problem:
    """Return the problem of a deliberate error."""
    retry_after_s = error.retry_after_s if isinstance(error, CapacityError) else None
    return make_problem(error.code, error.http_status, str(error), path=path, retry_after_s=retry_after_s)


def error_of(status: int, body: bytes, *, source: str) -> BridgeError:
    """Return the error that a problem body of the process `source` describes, as its own class.

    A body that is no problem, an unknown code and a failure inside the other process become PeerError. Other errors keep their
    codes over any number of hops.
    """
    try:
        problem = Problem.model_validate_json(body, extra="ignore")  # a later release may add fields
    except ValueError:
        return PeerError(f"{source} answered {status} without a problem body: {body[:200]!r}")
    kind = errors_by_code().get(problem.code)
    if kind is None or kind.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return PeerError(f"{source} answered {status} {problem.code}: {problem.detail}")
    if issubclass(kind, CapacityError):
        return kind(problem.detail, retry_after_s=problem.retry_after_s or 1.0)
    return kind(problem.detail)
