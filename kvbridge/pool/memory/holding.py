"""Things that a process may open once only: the first holder opens them, the last one closes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


@dataclass(eq=False)
class _Entry(Generic[ValueT]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the thing is being opened or closed, which may take long."""
    holders: int = 0
    values: list[ValueT] = field(default_factory=list)
    """Empty while it is closed."""


class HeldThings(Generic[KeyT, ValueT]):
    """Things by key, each open while it has holders."""

    def __init__(self) -> None:
        self._entries: dict[KeyT, _Entry[ValueT]] = {}
        self._lock = threading.Lock()

    def hold(
        self, key: KeyT, open_it: Callable[[], ValueT], *, check: Callable[[set[KeyT]], None] = lambda _: None
    ) -> ValueT:
        """Become a holder and return the thing; the first one opens it. What `open_it` raises leaves no holder behind.

        `check` sees the keys of all other things before anything is opened, and may raise.
        """
        with self._lock:
            check(self._entries.keys() - {key})
            entry = self._entries.setdefault(key, _Entry())
            entry.holders += 1
        try:
            with entry.lock:
                if not entry.values:
                    entry.values.append(open_it())
                return entry.values[0]
        except BaseException:
            self._leave(key, entry)
            raise

    def let_go(self, key: KeyT, close_it: Callable[[ValueT], None]) -> None:
        """Hold it no longer; the last one closes it. Only for holders."""
        entry = self._entries[key]
        with entry.lock:
            with self._lock:
                last = entry.holders == 1
            try:
                if last:
                    close_it(entry.values.pop())
            finally:
                self._leave(key, entry)

    def _leave(self, key: KeyT, entry: _Entry[ValueT]) -> None:
        with self._lock:
            entry.holders -= 1
            if not entry.holders:  # who came while it was being closed opens it anew, and is counted already
                self._entries.pop(key, None)

    def holders(self) -> dict[KeyT, int]:
        """Return everything that is open, with the number of its holders."""
        with self._lock:
            return {key: entry.holders for key, entry in self._entries.items() if entry.values}
