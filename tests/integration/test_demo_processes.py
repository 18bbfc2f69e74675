"""A process of the demo answers what it is asked, and its end is told in its words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbridge.core.closing import Closing
from kvbridge.core.errors import InvalidInputError, PeerError
from kvbridge.demo import processes
from kvbridge.demo.processes import EngineProcess

SPAWN = multiprocessing.get_context("spawn")


class Engine(Closing):
    """Does what it is told."""

    def __init__(self, left: Path) -> None:
        self.loaded = os.getpid()
        self._left = left

    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise InvalidInputError("no luck")

    def exit(self) -> None:
        sys.exit(7)

    def close(self) -> None:
        self._left.touch()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """An engine, its first answer, and the file that it leaves when it may detach."""
    without_server = SimpleNamespace(
        Pipe=SPAWN.Pipe, Process=SPAWN.Process, set_forkserver_preload=lambda _modules: None
    )
    monkeypatch.setattr(processes, "_processes", without_server)
    engine = EngineProcess("the engine", f"{__name__}:Engine", tmp_path, tmp_path / "left")
    yield engine, engine.answer(), tmp_path / "left"
    engine.close(at_once=True)


def test_answers_come_in_the_order_of_the_questions_until_it_detaches(started):
    engine, _, left = started
    for number in (1, 2):
        engine.ask("double", number)
    assert [engine.answer(), engine.answer()] == [2, 4]
    engine.check_running()
    engine.close(at_once=False)
    assert left.exists()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("fail", "the engine failed: no luck"),
        ("nothing", "AttributeError: 'Engine' object has no attribute 'nothing'"),
        ("exit", r"the engine ended \(exit code 7\); its log is empty"),
        ("killed", "killed by SIGKILL"),
    ],
)
def test_an_end_is_told_in_its_words(started, told, said):
    engine, pid, _ = started
    if told == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        engine.ask(told)
    with pytest.raises(PeerError, match=said):
        engine.answer()
    for look in (engine.answer, engine.check_running):
        with pytest.raises(PeerError, match="the engine ended"):
            look()
