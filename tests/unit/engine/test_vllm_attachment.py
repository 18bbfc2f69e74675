"""The thread that attaches to the node beside vLLM: it continues after every error, and logs each kind once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.core.ids import Role
from kvbridge.engine.kit import attachment
from kvbridge.engine.kit.attachment import NodeAttachment
from tests.helpers.hooked_vllm import Node

LIMIT_S = 30.0


class Attempts:
    """Attempts to attach, each with its error, in order; the last one succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.left = list(errors)
        self.made = Node(Role.DECODE).attach()
        self.pauses: list[float] = []

    def adopt(self, *_: object, **__: object) -> Any:
        if self.left:
            raise self.left.pop(0)
        return self.made


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    opened: list[NodeAttachment] = []
    wait_for = threading.Condition.wait_for

    def attach(*errors: Exception) -> Attempts:
        attempts = Attempts(*errors)
        monkeypatch.setitem(attachment.ENGINES, Role.DECODE, attempts)

        def counted(self: threading.Condition, predicate: Any, timeout: float | None = None) -> bool:
            if timeout in {attachment.PAUSE_S, attachment.LONG_PAUSE_S}:
                attempts.pauses.append(timeout)
                timeout = 0.0
            return wait_for(self, predicate, timeout)

        monkeypatch.setattr(threading.Condition, "wait_for", counted)
        opened.append(NodeAttachment(Role.DECODE, Path("/nowhere")))
        opened[-1].begin()
        opened[-1].wait(LIMIT_S)
        return attempts

    yield attach
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("errors", "said", "pause"),
    [
        ([ConfigError("it can be entered by others")] * 20 + [ConfigError("another")], ["config_invalid"] * 2, "LONG_PAUSE_S"),
        ([NotReadyError("it starts")] * 3, [], "PAUSE_S"),
        ([OSError("no descriptors are left")] * 2, ["internal"], "LONG_PAUSE_S"),
    ],
)  # fmt: skip
def test_what_somebody_has_to_change_is_said_once_and_asked_seldom_and_a_node_that_starts_up_often(
    attach: Any, errors: list[Exception], said: list[str], pause: str
) -> None:
    with capture_logs() as lines:
        attempts = attach(*errors)
    assert [(line["event"], line["code"]) for line in lines] == [("not_attached", code) for code in said]
    assert attempts.pauses == [getattr(attachment, pause)] * len(errors)
    assert not attempts.left
