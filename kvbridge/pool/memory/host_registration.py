"""Host memory that CUDA may read and write: registered once a process, however many parts of it want that.

Registering pins every page and takes 0.05 to 0.4 s for each GiB, once a process and mapping. A mapping cannot be closed
before its registration: the holder keeps a view of it.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial

from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConflictError, RegistrationError
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import Progress, ignore_progress, part_of
from kvbridge.pool.memory.holding import HeldThings
from kvbridge.pool.memory.memory_limits import control_group_limits
from kvbridge.pool.memory.shared_mapping import SharedMapping

Range = tuple[int, int]
"""(address, length in bytes) in this process."""

_ranges: HeldThings[Range, None] = HeldThings()


class HostRegistration(Closing):
    """Mappings that every CUDA device of this process reads and writes at their host addresses, until `close`.

    A second registration of the same mapping costs nothing; the last one that is closed ends it. Any thread may create and
    close one. Nothing on any device uses the memory any more when it is closed.
    """

    def __init__(
        self, mappings: Iterable[SharedMapping], *, device: int = 0, on_progress: Progress = ignore_progress
    ) -> None:
        """Register, in chunks of 1 GiB; `on_progress` counts over all mappings, and what it raises undoes everything.

        `device` is one that this process may use. Raises RegistrationError with cause and cure, UnsupportedError
        without CUDA; then nothing is registered that was not before.
        """
        self._stack = ExitStack()
        mappings = tuple(mappings)
        total_bytes = sum(mapping.length_bytes for mapping in mappings)
        done_bytes = 0
        try:
            for mapping in mappings:
                self._register(mapping, device, part_of(on_progress, done_bytes, total_bytes))
                done_bytes += mapping.length_bytes
                on_progress(done_bytes, total_bytes)
        except BaseException:
            self._stack.close()
            raise

    def _register(self, mapping: SharedMapping, device: int, on_progress: Progress) -> None:
        self._stack.callback(mapping.buffer.release)
        span = mapping.address, mapping.length_bytes
        label = f"shared memory {mapping.path}"
        register = partial(_register, span, device=device, label=label, on_progress=on_progress)
        _ranges.hold(span, register, check=partial(_check_apart, span, label))
        self._stack.callback(_ranges.let_go, span, lambda _: runtime.unregister_host(*span))

    def close(self) -> None:
        """Give it up. Harmless when closed."""
        self._stack.close()


def registered_ranges() -> dict[Range, int]:
    """Return what is registered in this process, with the number of holders of each range."""
    return _ranges.holders()


def _register(span: Range, *, device: int, label: str, on_progress: Progress) -> None:
    address, length_bytes = span
    try:
        runtime.register_host(address, length_bytes, device=device, on_progress=on_progress, label=label)
    except RegistrationError as error:
        raise RegistrationError(f"{error}. Here: {_limits()}") from error


def _check_apart(span: Range, label: str, others: set[Range]) -> None:
    start, length = span
    for other_start, other_length in others:
        if start < other_start + other_length and other_start < start + length:
            raise ConflictError(
                f"{label}: [{start:#x}, {start + length:#x}) overlaps [{other_start:#x}, {other_start + other_length:#x}), "
                "which is registered with CUDA already; register whole mappings only"
            )


def _limits() -> str:
    """The limits on pinning memory, as this process finds them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memlock = "no memlock limit" if soft == resource.RLIM_INFINITY else f"a memlock limit of {soft} bytes"
    groups = [f"{limit.name} with {limit.available_bytes} bytes left" for limit in control_group_limits()]
    return "; ".join([memlock, *groups])
