"""Sends spans to a collector: OpenTelemetry, OTLP over HTTP. The extra `traces` installs the libraries.

Spans wait in a bounded queue, and a thread sends them: a slow or absent collector costs spans, and delays only `close`. Nothing
registers a provider of spans, so FastAPI, which asks OpenTelemetry for one, gets none.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AnyValue

from kvbridge import __version__
from kvbridge.core.errors import ConfigError
from kvbridge.core.process import Clock, monotonic
from kvbridge.telemetry.metrics import SPANS
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import Span

log = structlog.get_logger(__name__)

MAX_QUEUE = 8_192
"""Limit of waiting spans; further spans are dropped."""
BATCH = 512
EVERY_S = 1.0
"""Longest wait of a span while no other spans are being sent."""
SAY_EVERY_S = 60.0
"""Shortest time between two log lines about lost spans."""
STEP_NS = 1_000_000
"""Spans follow the host's clock when somebody sets it by more than this; smaller differences come from reading two clocks."""

_SAMPLED, _FINE = TraceFlags(TraceFlags.SAMPLED), Status()
_SCOPE = InstrumentationScope("kvbridge", __version__)
EXPORTED, FAILED, DROPPED = "exported", "failed", "dropped"
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*:\s*(\S.*)")


def parse_headers(lines: Sequence[str], *, key: str) -> dict[str, str]:
    """Return the headers of lines `Name: value`. Raises ConfigError, which shows no value."""
    headers = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None or not found[2].isascii():
            raise ConfigError(f"{key}: each line must be a header, as 'Name: value' in ASCII, and one is not")
        headers[found[1]] = found[2]
    return headers


class _Counted(SpanExporter):
    """Counts exported and failed spans. Used by the queue's thread; others only read the counts."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self.exported = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class SpanExport:
    """Sends spans to one collector. Used from the event loop's thread only; its own thread ends with `close`."""

    def __init__(
        self, endpoint: str, *, timeout_s: float, names: Mapping[str, str], metrics: Metrics, clock: Clock = monotonic
    ) -> None:
        """Send spans to the URL `endpoint`. `names`: role, instance, node, incarnation, without unknown ones."""
        self._endpoint = endpoint
        self._metrics = metrics
        self._clock = clock
        self._session = requests.Session()
        self._session.trust_env = False
        self._headers: tuple[str, ...] = ()
        self._exporter = _Counted(OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s, session=self._session))
        self._queue = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUE,
            schedule_delay_millis=1000 * EVERY_S,
            max_export_batch_size=BATCH,
        )
        self._resource = _resource(names)
        self._wall_ns = self._wall_offset_ns()
        self._taken = 0
        self._counted = {EXPORTED: 0, FAILED: 0, DROPPED: 0}
        self._dropped = self._said = 0
        self._said_s = clock() - SAY_EVERY_S

    def use_headers(self, headers: Mapping[str, str]) -> None:
        """Send these headers with each request from now on, in place of the earlier headers."""
        for name in self._headers:
            self._session.headers.pop(name, None)
        self._headers = tuple(headers)
        self._session.headers.update(headers)

    def record(self, span: Span) -> None:
        """Queue a span that has ended; drop it when too many wait."""
        if self._taken - self._ended() >= MAX_QUEUE:
            self._dropped += 1
            return
        self._taken += 1
        context = span.context
        kind = SpanKind.SERVER if span.serves else SpanKind.CLIENT if span.calls else SpanKind.INTERNAL
        # A tracer would make ids and times of its own, and take four times as long.
        ended = ReadableSpan(
            span.name,
            _named(context.trace_id, context.span_id),
            _named(context.trace_id, context.parent_id) if context.parent_id else None,
            self._resource,
            span.attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else _FINE,
            start_time=self._unix_ns(span.begin_s),
            end_time=self._unix_ns(span.end_s),
            instrumentation_scope=_SCOPE,
        )
        self._queue.on_end(ended)

    def look(self, *, everything: bool = False) -> None:
        """Count exported, failed and dropped spans, and log now and then how many were lost. Call it often, and at the end."""
        now = {EXPORTED: self._exporter.exported, FAILED: self._exporter.failed, DROPPED: self._dropped}
        if now != self._counted:
            for outcome, spans in now.items():
                self._metrics.count(SPANS, outcome, by=spans - self._counted[outcome])
            self._counted = now
        lost = now[FAILED] + now[DROPPED]
        if lost > self._said and (everything or self._clock() - self._said_s >= SAY_EVERY_S):
            log.warning(
                "spans_lost", spans=lost - self._said, endpoint=self._endpoint, remedy="is the collector there?"
            )
            self._said, self._said_s = lost, self._clock()
        if abs(self._wall_offset_ns() - self._wall_ns) > STEP_NS:
            self._wall_ns = self._wall_offset_ns()

    def close(self, timeout_s: float) -> None:
        """Send waiting spans for at most `timeout_s`, blocking; the others are lost."""
        ending = threading.Thread(target=self._queue.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive():
            self._exporter.shutdown()  # nothing is tried again; a call that hangs ends with the process
            self._dropped += self._taken - self._ended()
            self._taken = self._ended()
        self.look(everything=True)

    def _ended(self) -> int:
        return self._exporter.exported + self._exporter.failed

    def _unix_ns(self, moment_s: float) -> int:
        return int(moment_s * 1e9) + self._wall_ns

    @staticmethod
    def _wall_offset_ns() -> int:
        return time.time_ns() - time.monotonic_ns()


def _named(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)


def _resource(names: Mapping[str, str]) -> Resource:
    """Return the attributes of this process; the variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add and replace some."""
    own: dict[str, AnyValue] = {f"kvbridge.{name}": value for name, value in names.items()}
    own |= {
        "service.name": f"kvbridge-{names['role']}",
        "service.version": __version__,
        "service.instance.id": names["incarnation"],
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
