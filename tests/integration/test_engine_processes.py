"""What engine processes of a run report, how their silence and their end are noticed, and what a run leaves behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.cli.local_cluster import ClusterSpec, NodeSpec
from kvbridge.core.errors import DeadlineError, InvalidInputError, PeerError
from kvbridge.demo.processes import Attached, Channel, ClusterRun, EngineProcess

pytestmark = pytest.mark.slow

SPEC = ClusterSpec(
    model={"preset": "tiny-v4"}, transport="local", prefill=NodeSpec(instance="p"), decode=NodeSpec(instance="d")
)


class Run(ClusterRun):
    """Keeps what it is told."""

    def __init__(self, keep_logs: Path | None = None) -> None:
        super().__init__("test", lambda _folder: SPEC, keep_logs=keep_logs, say=lambda _text: None)
        self.told: list[object] = []

    def handle(self, engine: EngineProcess, event: object) -> None:
        self.told.append(event)


def engine(job: str, channel: Channel) -> None:
    """An 'engine' that does what its job says; the others wait for their end."""
    channel.report(Attached())
    match job:
        case "echoes":
            channel.report(channel.next_order())
        case "fails":
            raise InvalidInputError("no luck")
        case "breaks":
            raise RuntimeError("out of luck")
        case "exits":
            sys.exit(7)
    channel.next_order()


def started(run: Run, job: str) -> EngineProcess:
    run.start_engine("prefill", "the prefill engine", "tests.integration.test_engine_processes:engine", job)
    run.next_report()
    assert run.attached == {"prefill"}
    return run.engines["prefill"]


@pytest.fixture
def run() -> Iterator[Run]:
    with Run() as made:
        yield made


def test_an_order_arrives_and_what_is_reported_comes_back(run: Run) -> None:
    started(run, "echoes").order({"number": 3})
    run.next_report()
    assert run.told == [{"number": 3}]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("fails", "the prefill engine failed: no luck"),
        ("breaks", "RuntimeError: out of luck"),
        ("exits", r"the prefill engine ended \(exit code 7\); its log is empty"),
    ],
)
def test_an_end_is_told_in_its_words(run: Run, job: str, said: str) -> None:
    ended = started(run, job)
    with pytest.raises(PeerError, match=said):
        run.next_report()
    ended.process.join()
    with pytest.raises(PeerError, match=r"the prefill engine ended"):
        ended.order("anything")


def test_killed_is_noticed_at_once(run: Run) -> None:
    started(run, "waits").process.kill()
    begun_s = time.monotonic()
    with pytest.raises(PeerError, match="killed by SIGKILL"):
        run.next_report()
    assert time.monotonic() - begun_s < 30, "it was told by its end, not by its silence"


def test_silence_ends_and_a_limit_is_kept(run: Run) -> None:
    started(run, "waits")
    run.next_report(0.05)
    run.silence_s = 0.3
    with pytest.raises(DeadlineError, match=r"no engine reported anything for 0\.3 s"):
        run.next_report()


def test_the_end_of_a_run_keeps_logs_and_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    with Run(tmp_path / "kept") as run:
        process = started(run, "waits").process
        pid = process.pid
    assert not run.folder.exists()
    assert (tmp_path / "kept" / "prefill-engine.log").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_daemon_that_has_died_is_the_cause() -> None:
    def silent(run: Run, *, dies: bool) -> None:
        with run, run.causes_named():
            if dies:
                run.cluster.decode.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
                run.cluster.decode.process.wait(30)
            raise DeadlineError("no engine reported anything")

    with pytest.raises(DeadlineError, match="no engine reported anything"):
        silent(Run(), dies=False)
    with pytest.raises(PeerError, match=r"the decode daemon ended \(exit code 3\)"):
        silent(Run(), dies=True)
