"""The thread that attaches to the node beside vLLM: it goes on whatever an attempt ends with, and says so once."""

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
    """What attempts to attach end with, in order; the last one succeeds."""

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


def test_what_somebody_has_to_change_is_said_once_and_asked_seldom(attach: Any) -> None:
    with capture_logs() as lines:
        attempts = attach(*[ConfigError("it can be entered by others")] * 20, ConfigError("another"))
    assert [line["reason"] for line in lines if line["event"] == "not_attached"] == [
        "it can be entered by others",
        "another",
    ]
    assert attempts.pauses == [attachment.LONG_PAUSE_S] * 21


def test_a_node_that_starts_up_is_asked_often_and_nothing_is_said_of_it(attach: Any) -> None:
    with capture_logs() as lines:
        attempts = attach(*[NotReadyError("it starts")] * 3)
    assert not lines
    assert attempts.pauses == [attachment.PAUSE_S] * 3


def test_the_thread_goes_on_after_an_error_that_nobody_foresaw(attach: Any) -> None:
    with capture_logs() as lines:
        attempts = attach(OSError("no descriptors are left"), OSError("no descriptors are left"))
    assert [(line["event"], line["code"]) for line in lines] == [("not_attached", "internal")]
    assert not attempts.left
