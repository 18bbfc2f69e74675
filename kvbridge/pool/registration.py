"""Registering a pool's memory piece by piece, so that somebody can watch.

Owns: the order and the sizes of the pieces. Must not know: with what memory is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.pool.extent import Extent, Progress, ignore_progress

DEFAULT_BATCH_BYTES = 8 << 30


def register_extents(
    extents: Sequence[Extent],
    register: Callable[[list[Extent]], None],
    *,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    on_progress: Progress = ignore_progress,
) -> None:
    """Call `register` with runs of extents of at most `batch_bytes` (or one longer extent), and report after each.

    Raises RegistrationError that says how far it came. What was registered before stays so: close the transport.
    """
    total = sum(extent.length_bytes for extent in extents)
    done = 0
    for batch in _batches(extents, batch_bytes):
        try:
            register(batch)
        except TransportError as error:
            raise RegistrationError(
                f"'{batch[0].label}' to '{batch[-1].label}' could not be registered, "
                f"after {done} of {total} bytes: {error}"
            ) from error
        done += sum(extent.length_bytes for extent in batch)
        on_progress(done, total)


def _batches(extents: Sequence[Extent], batch_bytes: int) -> list[list[Extent]]:
    batches: list[list[Extent]] = []
    length = 0
    for extent in extents:
        if batches and length + extent.length_bytes <= batch_bytes:
            batches[-1].append(extent)
            length += extent.length_bytes
        else:
            batches.append([extent])
            length = extent.length_bytes
    return batches
