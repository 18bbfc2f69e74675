"""Traces of a daemon by its configuration: off, on, and on where what they need is not installed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvbridge.config.endpoints import TracesConfig
from kvbridge.core.errors import ConfigError
from kvbridge.daemon.lifecycle import Traces
from kvbridge.daemon.secret_files import SecretFiles
from kvbridge.telemetry.facts import PairingEnded
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.stream import EventStream
from tests.helpers.span_collector import span_collector


def opened(config: TracesConfig, secrets: SecretFiles | None = None) -> Traces:
    traces = Traces()
    names = {"role": "bootstrap", "incarnation": "abc"}
    traces.open(config, names=names, metrics=Metrics(role="bootstrap"), secrets=secrets or SecretFiles())
    return traces


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvbridge.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "requests", None)
    with pytest.raises(ConfigError, match=r"telemetry\.traces\.endpoint is set.*install kvbridge\[traces\]"):
        opened(TracesConfig(endpoint="http://127.0.0.1:4318"))


@pytest.mark.outside
def test_headers_come_from_their_file_and_change_with_it(tmp_path: Path):
    file = tmp_path / "headers"
    file.write_text("x-key: one\n")
    with span_collector() as collector:
        secrets = SecretFiles()
        config = TracesConfig(endpoint=collector.url, headers_file=file)
        traces, stream = opened(config, secrets), EventStream()
        traces.read(stream)
        file.write_text("x-key: another\n")
        [secret] = secrets._followed
        secret.follow()
        trace = traces.begin(None)
        stream.emit(PairingEnded(room=1, generation=1, seconds=0.5, outcome="paired", trace=trace))
        asyncio.run(traces.close(20.0))
        [span] = collector.spans
        assert (span.name, span.trace_id, span.parent_id) == ("pair", trace.trace_id, "")
        assert collector.headers[0]["x-key"] == "another"
    with pytest.raises(ConfigError, match=r"telemetry\.traces\.headers_file: cannot read"):
        opened(TracesConfig(endpoint="http://127.0.0.1:4318", headers_file=tmp_path / "none"))
