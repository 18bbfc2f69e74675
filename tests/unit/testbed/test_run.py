"""What a run leaves behind, and whom it names when something goes wrong."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from kvbridge.cli.local_cluster import ClusterSpec, NodeSpec
from kvbridge.core.errors import DeadlineError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.testbed.engines.messages import Failed
from kvbridge.testbed.options import CommandOptions
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.run import ClusterRun

SPEC = ClusterSpec(
    model={"preset": "tiny-v4"}, transport="local", prefill=NodeSpec(instance="p"), decode=NodeSpec(instance="d")
)


class Run(ClusterRun):
    def handle(self, engine, event):
        raise AssertionError(f"{engine.name} said {event}")


def run(keep_logs=None):
    options = CommandOptions(patience_s=5.0, keep_logs=keep_logs)
    progress = ShownProgress(Console(file=io.StringIO()))
    return Run("kvbridge.testbed.nothing", options, progress, events=TypeAdapter(Failed), spec=lambda folder: SPEC)


def fail_in(ours, prepare):
    with ours, ours.causes_named():
        prepare(ours.cluster)
        raise DeadlineError("no engine said anything")


def end_decode(cluster):
    cluster.decode.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    cluster.decode.process.wait(30)


@pytest.mark.outside
def test_its_end_keeps_logs_and_leaves_no_process_and_no_folder(tmp_path):
    kept = tmp_path / "kept"
    with run(kept) as ours:
        ours.start_engines(FrozenModel(), {"prefill": "the prefill engine"})
        engine = ours.engines["prefill"]
        engine.process.wait(30)
    engine.wait_last_words()
    engine.process.stdout.close()
    assert not ours.folder.exists()
    assert "kvbridge.testbed.nothing" in (kept / "prefill-engine.log").read_text()
    assert (kept / "job.json").exists()


def test_what_went_wrong_before_the_daemons_were_started_is_told_as_it_is():
    with pytest.raises(DeadlineError, match="no engine said anything"):
        fail_in(run(), lambda cluster: None)


@pytest.mark.outside
def test_a_daemon_that_has_died_is_the_cause():
    with pytest.raises(PeerError, match=r"the decode daemon ended \(exit code 3\)"):
        fail_in(run(), end_decode)
