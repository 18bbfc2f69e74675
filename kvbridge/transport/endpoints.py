"""Reading what a peer's transport says of itself.

Owns: the refusal of an endpoint that is another backend's or cannot be read. Must not know: what is in it.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvbridge.core.errors import TransportError
from kvbridge.transport.base import Endpoint

ContentT = TypeVar("ContentT", bound=BaseModel)


def read_endpoint(endpoint: Endpoint, transport: str, content: type[ContentT]) -> ContentT:
    """Return the content of a peer's endpoint. Raises TransportError when it is not one of `transport`, or unreadable."""
    if endpoint.transport != transport:
        raise TransportError(f"an endpoint of transport '{endpoint.transport}' was given to {transport}")
    try:
        return content.model_validate_json(endpoint.data, extra="ignore")
    except ValidationError as error:
        raise TransportError(
            f"a peer's {transport} endpoint cannot be read: {error.error_count()} errors, the first: "
            f"{error.errors()[0]['msg']}; both sides must run the same release"
        ) from error
