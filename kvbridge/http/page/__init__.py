"""The status page: its files, and the document that it shows.

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
"""The document is made so often at most, however many look."""

Document = dict[str, Any]
"""What the page shows, as JSON is made of it."""


class Shown:
    """The document, made when somebody looks and the last one is old."""

    def __init__(self, make: Callable[[], Document], clock: Clock = monotonic) -> None:
        self._make = make
        self._clock = clock
        self._made_s = -KEPT_S
        self._content = b""

    def content(self) -> bytes:
        """Return the document as JSON."""
        now_s = self._clock()
        if not self._content or now_s - self._made_s >= KEPT_S:
            self._content, self._made_s = to_json(self._make()), now_s
        return self._content


def page_router(make: Callable[[], Document], *, asks_token: bool) -> APIRouter:
    """Return the routes of the page; `asks_token`: it has to, before it calls the daemon."""
    router = APIRouter(include_in_schema=False)
    contents = {name: file.read_bytes() for name, file in FILES.items()}
    shown = Shown(make)
    if asks_token:
        contents["index.html"] = contents["index.html"].replace(b'data-token="none"', b'data-token="required"')

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return _response("index.html", contents["index.html"])

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in contents:
            raise NotFoundError(f"the page has no file '{name}'")
        return _response(name, contents[name])

    @router.get("/v1/page")
    async def document() -> Response:
        return Response(shown.content(), media_type="application/json", headers={"Cache-Control": "no-store"})

    return router


def _response(name: str, content: bytes) -> Response:
    return Response(content, headers=HEADERS, media_type=KINDS[FILES[name].suffix])
