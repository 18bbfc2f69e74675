"""A process of the demo answers what it is asked, and its end is told in its words."""

import multiprocessing
import os
import signal
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from kvbridge.core.errors import InvalidInputError, PeerError
from kvbridge.demo import run
from kvbridge.demo.run import EngineProcess

SPAWN = multiprocessing.get_context("spawn")


class Engine(ExitStack):
    def double(self, number: int) -> int:
        return 2 * number

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise InvalidInputError("no luck")

    def exit(self) -> None:
        sys.exit(7)


@pytest.fixture
def started(tmp_path, monkeypatch):
    without_server = SimpleNamespace(Pipe=SPAWN.Pipe, Process=SPAWN.Process, set_forkserver_preload=lambda _: None)
    monkeypatch.setattr(run, "_processes", without_server)
    engine = EngineProcess("the engine", __name__, "Engine", tmp_path / "log")
    assert answer(engine) is None
    yield engine
    engine.close()


def answer(engine: EngineProcess):
    return engine.answer(lambda: None)


def test_answers_come_in_the_order_of_the_questions(started):
    for number in (1, 2):
        started.ask("double", number)
    assert [answer(started), answer(started)] == [2, 4]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("fail", r"the engine ended \(exit code 1\); its log ends:\n(.*\n)*.*no luck"),
        ("nothing", "AttributeError: 'Engine' object has no attribute 'nothing'"),
        ("exit", r"the engine ended \(exit code 7\); its log is empty"),
        ("killed", "killed by SIGKILL"),
    ],
)
def test_an_end_is_told_in_its_words(started, told, said):
    if told == "killed":
        started.ask("pid")
        os.kill(answer(started), signal.SIGKILL)
    else:
        started.ask(told)
    for _ in range(2):
        with pytest.raises(PeerError, match=said):
            answer(started)
        started.ask("double", 1)


def test_a_check_that_fails_is_raised_while_an_answer_is_waited_for(started):
    def check() -> None:
        raise PeerError("a daemon ended")

    with pytest.raises(PeerError, match="a daemon ended"):
        started.answer(check)
