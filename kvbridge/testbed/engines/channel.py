"""An engine process's end of its pipes to the command that started it.

Owns: how orders and events travel (JSON lines over standard input and output).
Must not know: what an order asks for.
"""

from __future__ import annotations

import os
import select
import sys
from typing import Generic, TextIO, TypeVar

from pydantic import TypeAdapter

from kvbridge.core.ids import FrozenModel

_READ_BYTES = 1 << 16

OrderT = TypeVar("OrderT")


class Channel(Generic[OrderT]):
    """Orders come on standard input, events go to standard output.

    The descriptor of standard output is taken over, and what libraries print goes to standard error, which is the log.
    """

    def __init__(self, orders: TypeAdapter[OrderT]) -> None:
        self.ended = False
        """Whether there will be no more orders."""
        self._orders = orders
        sys.stdout.flush()
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._unread = b""

    def report(self, event: FrozenModel) -> None:
        """Report an event."""
        self._out.write(event.model_dump_json() + "\n")
        self._out.flush()

    def next_order(self, timeout_s: float | None = None) -> OrderT | None:
        """Return the next order, waiting up to `timeout_s` (None: as long as it takes).

        None: there was none in time, or there will be no more (`ended`).
        """
        while b"\n" not in self._unread and not self.ended:
            if not select.select([0], [], [], timeout_s)[0]:
                return None
            read = os.read(0, _READ_BYTES)
            self._unread += read
            self.ended = not read
        line, _, self._unread = self._unread.partition(b"\n")
        return self._orders.validate_json(line) if line else None
