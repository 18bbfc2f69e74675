"""The status page: what a browser is sent before it may see anything.

Owns: the files beside this one, their routes and headers. Must not know: what the page will show.

The files hold no data, so they need no token; the page asks for one and sends it with what it fetches (`page.js`). Nothing is built
and nothing comes from elsewhere: scripts and styles of this daemon alone may run, which the Content-Security-Policy enforces.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

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


def page_router(*, asks_token: bool) -> APIRouter:
    """Return the routes of the page; `asks_token`: it has to, before it calls the daemon."""
    router = APIRouter(include_in_schema=False)
    contents = {name: file.read_bytes() for name, file in FILES.items()}
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

    return router


def _response(name: str, content: bytes) -> Response:
    return Response(content, headers=HEADERS, media_type=KINDS[FILES[name].suffix])
