"""The orders of one rank that have not ended: which ones wait for which peer, and which are active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from kvbridge.worker.orders import Order, RoomKey


class OrderBook:
    """Each order waits, then is active, then has ended. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Order, None]] = {}
        """By peer, in the order in which they came; no peer without one."""
        self._active: dict[Order, None] = {}
        self._active_to: Counter[str] = Counter()
        self._peer_of: dict[Order, str] = {}
        self._of_room: dict[RoomKey, dict[Order, None]] = {}

    def __len__(self) -> int:
        return len(self._peer_of)

    @property
    def waiting(self) -> int:
        """Count the orders that wait."""
        return len(self._peer_of) - len(self._active)

    @property
    def active(self) -> Collection[Order]:
        """Return the orders that have begun, the first one first."""
        return self._active.keys()

    def of_room(self, key: RoomKey) -> Collection[Order]:
        """Return the orders of a room."""
        return self._of_room.get(key, {}).keys()

    def waiting_for(self, peer: str) -> Collection[Order]:
        """Return the orders that wait for a peer."""
        return self._waiting.get(peer, {}).keys()

    def add(self, order: Order, peer: str) -> None:
        """Let an order wait for its peer."""
        self._peer_of[order] = peer
        self._of_room.setdefault(order.key, {})[order] = None
        self._waiting.setdefault(peer, {})[order] = None

    def fail(self, order: Order, code: str, reason: str) -> None:
        """Fail an order. One that waits is active at once: nothing is in flight of it, so it ends with the next look."""
        order.fail(code, reason)
        if order not in self._active:
            self._begin(order)

    def begin(self, most: int, *, is_ready: Callable[[str], bool], is_written: Callable[[Order], bool]) -> list[Order]:
        """Return the orders that begin now: at most `most` to a peer are active, in the order in which they came.

        Orders of one peer whose memory `is_written` overtake those whose memory is not yet.
        """
        found: list[Order] = []
        for peer, waiting in self._waiting.items():
            free = most - self._active_to[peer]
            if free <= 0 or not is_ready(peer):
                continue
            chosen = []
            for order in waiting:
                if is_written(order):
                    chosen.append(order)
                    if len(chosen) == free:
                        break
            found += chosen
        for order in found:
            self._begin(order)
        return found

    def _begin(self, order: Order) -> None:
        peer = self._peer_of[order]
        del self._waiting[peer][order]
        if not self._waiting[peer]:
            del self._waiting[peer]
        self._active[order] = None
        self._active_to[peer] += 1

    def end(self, order: Order) -> None:
        """Forget an active order."""
        del self._active[order]
        peer = self._peer_of.pop(order)
        self._active_to[peer] -= 1
        if not self._active_to[peer]:
            del self._active_to[peer]
        of_room = self._of_room[order.key]
        del of_room[order]
        if not of_room:
            del self._of_room[order.key]
