"""Spans sent to a real collector: counts, an absent or hanging collector, and the end."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import structlog
from structlog.testing import LogCapture

from kvbridge.core.errors import ConfigError
from kvbridge.telemetry import tracing
from kvbridge.telemetry.context import TraceContext
from kvbridge.telemetry.metrics import SPANS
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import Span
from kvbridge.telemetry.tracing import SpanExport, parse_headers
from tests.helpers.local_servers import held_ports
from tests.helpers.manual_clock import ManualClock
from tests.helpers.span_collector import Collector, span_collector

NAMES = {"role": "decode", "instance": "d0", "node": "n0", "incarnation": "abc"}
ABOVE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)


def span(number: int = 0, **more) -> Span:
    now_s = time.monotonic()
    return Span("room", ABOVE.child(f"room {number}"), now_s - 0.25, now_s, {"kvbridge.room": number}, **more)


class Bench:
    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.clock = ManualClock(1000.0)
        self.metrics = Metrics(role="decode")
        self.export = SpanExport(url, timeout_s=timeout_s, names=NAMES, metrics=self.metrics, clock=self.clock)

    def counted(self) -> dict[str, float]:
        self.export.look()
        return {labels[0]: value for labels, value in self.metrics._values[SPANS].items() if value}

    def wait(self, wanted: Callable[[dict[str, float]], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not wanted(self.counted()):
            assert time.monotonic() < deadline_s, self.counted()
            time.sleep(0.02)


@pytest.fixture
def lines() -> Iterator[list]:
    before, capture = structlog.get_config(), LogCapture()
    structlog.configure(processors=[capture])
    yield capture.entries
    structlog.configure(**before)


@pytest.fixture
def fast(monkeypatch) -> None:
    monkeypatch.setattr(tracing, "EVERY_S", 0.02)


def shown(collector: Collector) -> list[int]:
    return sorted(found.room for found in collector.spans)


def test_a_span_arrives_as_it_was(fast):
    with span_collector() as collector:
        bench = Bench(f"{collector.url}/v1/traces")
        bench.export.use_headers({"x-api-key": "one"})
        sent = span(7, error="peer_failed", serves=True)
        bench.export.record(sent)
        bench.wait(lambda counted: counted == {"exported": 1})
        bench.export.use_headers({"x-other": "two"})
        bench.export.record(span(8))
        bench.export.close(10.0)
    first = next(found for found in collector.spans if found.room == 7)
    assert (first.trace_id, first.span_id, first.parent_id) == (ABOVE.trace_id, sent.context.span_id, ABOVE.span_id)
    assert (first.name, first.kind, first.error) == ("room", 2, "peer_failed")
    assert abs(first.end_ns - first.begin_ns - 250_000_000) < 1000
    assert abs(first.end_ns - time.time_ns()) < 30e9
    assert first.service == "kvbridge-decode"
    assert first.resource["kvbridge.instance"] == "d0"
    assert first.resource["service.instance.id"] == "abc"
    assert [headers.get("x-api-key") for headers in collector.headers] == ["one", None]
    assert collector.headers[1]["x-other"] == "two"
    assert shown(collector) == [7, 8]


def test_the_end_sends_what_waits():
    with span_collector() as collector:
        bench = Bench(f"{collector.url}/v1/traces")
        for number in range(1000):
            bench.export.record(span(number))
        bench.export.close(20.0)
        assert shown(collector) == list(range(1000))
        assert bench.counted() == {"exported": 1000}


def test_spans_that_a_collector_refuses_are_counted_and_told_seldom(fast, lines):
    with span_collector(status=503) as collector:
        bench = Bench(f"{collector.url}/v1/traces", timeout_s=3.0)
        for number in range(3):
            bench.export.record(span(number))
        bench.wait(lambda counted: counted == {"failed": 3})
        bench.export.record(span(3))
        bench.wait(lambda counted: counted == {"failed": 4})
        assert [line["event"] for line in lines] == ["spans_lost"], "more of it is not told yet"
        told = lines[0]["spans"]
        bench.clock.advance(tracing.SAY_EVERY_S)
        bench.export.look()
        assert [line["spans"] for line in lines] == [told, 4 - told]
        collector.status = 200
        bench.export.record(span(5))
        bench.wait(lambda counted: counted == {"failed": 4, "exported": 1})
        bench.export.close(10.0)
    with held_ports(1) as (port,):  # nobody listens
        bench = Bench(f"http://127.0.0.1:{port}/v1/traces", timeout_s=0.2)
        bench.export.record(span())
        bench.wait(lambda counted: counted == {"failed": 1})
        bench.export.close(5.0)


def test_a_collector_that_hangs_costs_spans_and_no_time(fast, monkeypatch, lines):
    monkeypatch.setattr(tracing, "MAX_QUEUE", 600)
    with span_collector(hangs=threading.Event()) as collector:
        bench = Bench(f"{collector.url}/v1/traces", timeout_s=30.0)
        begun_s = time.monotonic()
        for number in range(2000):
            bench.export.record(span(number))
        assert bench.counted() == {"dropped": 1400}, "as many wait as may, those in the hanging request among them"
        bench.export.close(0.2)
        assert time.monotonic() - begun_s < 30.0, "nobody waited for the collector, not even at the end"
        assert bench.counted() == {"dropped": 2000}
        assert lines[-1]["event"] == "spans_lost"
        assert sum(line["spans"] for line in lines) == 2000


def test_headers_of_a_file():
    assert parse_headers(("x-key: a: b ", "Authorization:Basic abc="), key="k") == {
        "x-key": "a: b ",
        "Authorization": "Basic abc=",
    }
    for wrong in ("no colon", "a b: c", "x-key:", ": hidden", "x: ä"):
        with pytest.raises(ConfigError, match=r"telemetry\.x: each line must be a header") as caught:
            parse_headers((wrong,), key="telemetry.x")
        assert wrong not in str(caught.value), "it may be a secret"
