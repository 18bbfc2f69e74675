"""The status page: its files, and the one document that it shows.

The files hold no data, so they need no token; the page asks for one and sends it with what it fetches (`page.js`). Nothing comes
from elsewhere: scripts and styles of this daemon alone may run, which the Content-Security-Policy enforces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic_core import to_json

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import NotFoundError

FOLDER = Path(__file__).parent
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {file.name: file for file in sorted(FOLDER.iterdir()) if file.suffix in KINDS}
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in FILES)})
"""Open to everybody."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a page of one release must not run with scripts of another
}
KEPT_S = 1.0
"""The document is made this often at most, for all who look."""

Document = dict[str, Any]
"""The content of the page, from which JSON is made."""


def page_router(make: Callable[[], Document], *, asks_token: bool, clock: Clock = monotonic) -> APIRouter:
    """Return the routes of the page; `asks_token`: the page has to ask for one before it calls the daemon."""
    router = APIRouter(include_in_schema=False)
    contents = {name: file.read_bytes() for name, file in FILES.items()}
    made_s, document = 0.0, b""
    if asks_token:
        contents["index.html"] = contents["index.html"].replace(b'data-token="none"', b'data-token="required"')

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return await file("index.html")

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in contents:
            raise NotFoundError(f"the page has no file '{name}'")
        return Response(contents[name], headers=HEADERS, media_type=KINDS[FILES[name].suffix])

    @router.get("/v1/page")
    async def shown() -> Response:
        nonlocal made_s, document
        if not document or clock() - made_s >= KEPT_S:
            made_s, document = clock(), to_json(make())
        return Response(document, media_type="application/json", headers={"Cache-Control": "no-store"})

    return router
