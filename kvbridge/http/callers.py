"""Callers: what their tokens may name, and those that hang up while they wait.

Owns: noticing it, and ending what was done for them. Must not know: what that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Depends, Request

from kvbridge.core.errors import ConflictError
from kvbridge.core.prefixes import Namespaces

ResultT = TypeVar("ResultT")

LEFT = "its client left before it was told"
"""Why something is undone that nobody waits for any more."""


async def namespaces_of(connection: Request) -> Namespaces:
    """Return what the token of a request may name (`middleware.BearerToken`).

    It is `async` since FastAPI hands each call of what is not to a thread.
    """
    named: Namespaces = connection.scope["state"]["namespaces"]
    return named


MAY_NAME = Depends(namespaces_of)
"""For a route that carries what its caller may name to a service."""


async def while_connected(
    connection: Request,
    work: Coroutine[Any, Any, ResultT],
    undo: Callable[[ResultT], Awaitable[object]] | None = None,
) -> ResultT:
    """Return what `work` returns; cancel it, or undo what it has done, when its caller closes the connection before that."""
    working = asyncio.ensure_future(work)
    closed = asyncio.ensure_future(_closed(connection))
    try:
        await asyncio.wait({working, closed}, return_when=asyncio.FIRST_COMPLETED)
        left = closed.done()
    finally:
        closed.cancel()
        working.cancel()
        await asyncio.gather(working, closed, return_exceptions=True)
    if left:
        if undo is not None and not working.cancelled() and working.exception() is None:
            await undo(working.result())
        raise ConflictError("the caller closed the connection while it waited")
    return working.result()


async def _closed(connection: Request) -> None:
    while (await connection.receive())["type"] != "http.disconnect":
        pass
