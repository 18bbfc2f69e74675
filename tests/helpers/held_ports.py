"""Ports for those who have to know theirs before they listen, or listen again at the same one.

A port that was only found free may be somebody else's by then: other tests of this machine take ports all the time.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports of 127.0.0.1 that nobody gets who does not name them. Whoever does, and sets SO_REUSEADDR, may listen there."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))  # and never listens
        yield [each.getsockname()[1] for each in held]
