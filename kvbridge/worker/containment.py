"""Where a defect in the work for one peer, order or room ends: with that work, and not with the rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from kvbridge.core.errors import BridgeError

log = structlog.get_logger(__name__)


@contextmanager
def contained(work: str, **names: object) -> Iterator[None]:
    """Let deliberate errors pass; log any other exception with its traceback, and raise a BridgeError in its place.

    `work` says what is done, for the message; `names` say for whom, for the log.
    """
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        log.exception("work_failed", work=work, **names)
        raise BridgeError(f"{work} failed with {type(error).__name__}: {error}; please report it") from error
