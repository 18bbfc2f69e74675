"""A collector of spans: an HTTP server that takes OTLP's ExportTraceServiceRequest, as the OpenTelemetry project describes it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    resource: dict[str, Any]
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    error: str
    """The text of a status that is an error; empty for others."""

    @property
    def room(self) -> int | None:
        return self.attributes.get("kvbridge.room")


@dataclass
class Collector:
    url: str = ""
    status: int = 200
    spans: list[ReceivedSpan] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    hangs: threading.Event | None = None
    """While it is not set, requests get no answer."""

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.begin_ns)

    def wait(self, what: str, enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not enough(list(self.spans)):
            assert time.monotonic() < deadline_s, f"{what}: only {sorted({s.name for s in self.spans})} came"
            time.sleep(0.05)


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value") or "string_value")


def _received(body: bytes) -> Iterator[ReceivedSpan]:
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
    for of_resource in request.resource_spans:
        resource = {pair.key: _value(pair.value) for pair in of_resource.resource.attributes}
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield ReceivedSpan(
                    service=resource["service.name"],
                    resource=resource,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    begin_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    kind=span.kind,
                    attributes={pair.key: _value(pair.value) for pair in span.attributes},
                    error=(span.status.message or "error") if span.status.code == 2 else "",
                )


@contextmanager
def span_collector(**settings: Any) -> Iterator[Collector]:
    collector = Collector(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            collector.headers.append({key.lower(): value for key, value in self.headers.items()})
            if collector.hangs is not None and not collector.hangs.wait(60.0):
                return
            if collector.status == 200:
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.spans.extend(_received(body))
            answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Whoever is answered late has gone."""

    server = Server(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        if collector.hangs is not None:
            collector.hangs.set()
        server.shutdown()
        server.server_close()
        thread.join(10.0)
