"""Imports of a process that has nothing else to do meanwhile."""

from __future__ import annotations

import gc
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

UNUSED_BY_DAEMONS = ("rich", "pygments", "trio")
"""structlog and httpx load two of them for coloured output, httpcore the third for its event loop, wherever they are installed."""


@contextmanager
def importing(*unused: str) -> Iterator[None]:
    """Import without the cycle collector, which would walk again and again through modules that stay.

    `unused`: packages that are treated as not installed meanwhile.
    """
    hidden = [name for name in unused if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None there is an ImportError
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in hidden:
            del sys.modules[name]


@contextmanager
def certificates_unread() -> Iterator[None]:
    """Import aiohttp, which reads the system's certificates for two contexts that no call of ours uses, without doing so."""
    create = ssl.create_default_context
    ssl.create_default_context = lambda *_, **__: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
    try:
        yield
    finally:
        ssl.create_default_context = create


@contextmanager
def models_built_when_used() -> Iterator[None]:
    """Import FastAPI without building the forty models of an OpenAPI document, which few daemons are ever asked for."""
    rebuild = BaseModel.__dict__["model_rebuild"]

    def only_when_used(kind: type[BaseModel], /, **options: Any) -> bool | None:  # noqa: ANN401 - as pydantic has it
        asked_by_import = sys._getframe(1).f_code.co_name == "<module>"  # noqa: SLF001 - there is no other name for it
        return None if asked_by_import else rebuild.__func__(kind, **options)

    BaseModel.model_config["defer_build"] = True
    BaseModel.model_rebuild = classmethod(only_when_used)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BaseModel.model_rebuild = rebuild  # type: ignore[method-assign]
        del BaseModel.model_config["defer_build"]
