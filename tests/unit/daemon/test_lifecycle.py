"""How a daemon starts, says where it is, ticks and ends, also when one of its parts does not; and its traces."""

import asyncio
import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbridge.api.endpoint_file import ENDPOINT_FILE, DaemonEndpoint, read_endpoint, write_endpoint
from kvbridge.api.status import Readiness
from kvbridge.config.endpoints import TracesConfig
from kvbridge.config.schema import PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.daemon import node as node_module
from kvbridge.daemon.lifecycle import Daemon, run_daemon
from kvbridge.daemon.node import TICK_S
from kvbridge.daemon.prefill import prefill_daemon
from kvbridge.telemetry.facts import EventStream, PairingEnded
from kvbridge.telemetry.registry import Metrics
from tests.helpers.manual_clock import ManualClock
from tests.helpers.span_collector import span_collector


class BrokenServer:
    async def stop(self) -> None:
        raise RuntimeError("the server ended by itself")


def test_a_part_that_cannot_be_closed_does_not_keep_the_memory(tmp_path: Path) -> None:
    config = {"instance": "p", "model": {"preset": "tiny-v4"}, "pools": {"device": {"full": 8, "swa": 4, "request": 2}}}

    async def live() -> None:
        node = prefill_daemon(PrefillConfig.model_validate(config))
        node._http = BrokenServer()  # type: ignore[assignment]
        await node.memory.create(tmp_path, "made", cancel_s=5)
        assert node.memory.device
        waiting = node.background(asyncio.sleep(60), "waits")
        try:
            await node.close()
        finally:
            assert waiting.cancelled()

    with pytest.raises(RuntimeError, match="ended by itself"):
        asyncio.run(live())
    assert not list(tmp_path.iterdir())


class Observed(Daemon):
    """A daemon that counts, once it has started, the objects that a full collection would visit, and ends."""

    def __init__(self) -> None:
        super().__init__(Metrics(role="bootstrap"), spans_s=0.0)
        self.parts = [[] for _ in range(1000)]
        self.frozen = self.collected = 0

    async def failed(self) -> None:
        self.frozen, self.collected = gc.get_freeze_count(), len(gc.get_objects())


def test_the_collector_leaves_alone_what_a_daemon_is_made_of() -> None:
    daemon = Observed()
    try:
        asyncio.run(run_daemon(daemon))
    finally:
        gc.unfreeze()
    assert daemon.frozen > 1000 > daemon.collected


def test_the_log_has_each_change_of_readiness_once(capsys: pytest.CaptureFixture[str]) -> None:
    daemon = Daemon(Metrics(role="bootstrap"), spans_s=0.0)
    for reasons in ((), (), ("the pools are being made",), ("the pools are being made",), ()):
        daemon.tell(Readiness(ready=not reasons, reasons=reasons))
    lines = "".join(capsys.readouterr()).splitlines()
    assert ["daemon_not_ready" in line for line in lines] == [False, True, False]


STOPPED_S = 30.5


async def test_heartbeats_that_were_missed_are_not_caught_up(monkeypatch):
    """A burst of heartbeats would tell peers nothing, and each checks all links."""
    clock, beats = ManualClock(), []
    config = {"instance": "i", "model": {"preset": "tiny-gqa"}, "pools": {"device": {"full": 8}}}
    daemon = prefill_daemon(PrefillConfig.model_validate(config | {"timeouts": {"control_heartbeat_s": 1.0}}))
    monkeypatch.setattr(daemon.peers, "watch", lambda: beats.append(clock()))
    begun_s, times = clock(), iter([1.0, STOPPED_S, *(STOPPED_S + tick * TICK_S for tick in range(1, 31))])

    async def sleep(_seconds: float) -> None:
        try:
            clock.advance(begun_s + next(times) - clock())
        except StopIteration:
            raise asyncio.CancelledError from None

    monkeypatch.setattr(node_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(node_module, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        await daemon._ticks()
    assert [round(beat - begun_s, 2) for beat in beats] == [1.0, 30.5, 31.5], "once, and then as ever"


def opened(config: TracesConfig, stream: EventStream | None = None) -> Daemon:
    daemon = Daemon(Metrics(role="bootstrap"), spans_s=20.0)
    daemon.open_traces(config, {"role": "bootstrap", "incarnation": "abc"}, stream or EventStream())
    return daemon


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvbridge.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(ConfigError, match=r"telemetry\.traces\.endpoint is set.*'\.\[traces\]'"):
        opened(TracesConfig(endpoint="http://127.0.0.1:4318"))


@pytest.mark.outside
def test_headers_come_from_their_file_and_change_with_it(tmp_path: Path):
    file = tmp_path / "headers"
    file.write_text("x-key: one\n")
    with span_collector() as collector:
        config, stream = TracesConfig(endpoint=collector.url, headers_file=file), EventStream()
        daemon = opened(config, stream)
        file.write_text("x-key: another\n")
        [secret] = daemon._secrets
        secret.follow()
        trace = daemon.begin_trace(None)
        stream.emit(PairingEnded(room=1, generation=1, seconds=0.5, outcome="paired", trace=trace))
        asyncio.run(daemon.close())
        [span] = collector.spans
        assert (span.name, span.trace_id, span.parent_id) == ("pair", trace.trace_id, "")
        assert collector.headers[0]["x-key"] == "another"
    with pytest.raises(ConfigError, match=r"telemetry\.traces\.headers_file: cannot read"):
        opened(TracesConfig(endpoint="http://127.0.0.1:4318", headers_file=tmp_path / "none"))


def test_the_file_of_another_user_is_refused_and_half_of_one_is_none_yet(tmp_path, monkeypatch):
    assert read_endpoint(tmp_path) is None
    write_endpoint(tmp_path, DaemonEndpoint(role="prefill", incarnation="i", pid=1, http_url="http://127.0.0.1:1"))
    assert read_endpoint(tmp_path) is not None
    monkeypatch.setattr("kvbridge.api.endpoint_file.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"was written by user {os.getuid()}, not by user {os.getuid() + 1}"):
        read_endpoint(tmp_path)
    monkeypatch.undo()
    (tmp_path / ENDPOINT_FILE).write_text("{")
    assert read_endpoint(tmp_path) is None
