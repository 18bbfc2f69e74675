"""The thread beside vLLM that keeps a node running."""

from __future__ import annotations

import threading
from collections import deque

from kvbridge.core.ids import Role
from kvbridge.engine.kit.node import LAST_ENDS, NodeProcess


def test_a_node_is_started_again_though_the_one_before_could_not_be_followed() -> None:
    """As when there is no descriptor left for a moment."""
    node = NodeProcess.__new__(NodeProcess)
    node._role, node.ends = Role.DECODE, deque(maxlen=LAST_ENDS)
    runs: list[str] = []
    node._closing = threading.Event()
    node._closing.wait = lambda *_: False

    def run() -> str:
        runs.append("run")
        if len(runs) == 1:
            raise OSError("no descriptors are left")
        node._closing.set()
        return "exit code 0"

    node._run = run
    node._keep()
    assert len(runs) == 2
    assert list(node.ends) == ["it could not be followed: OSError: no descriptors are left"]
