"""A collector that receives spans over OTLP/HTTP and keeps them as a graph."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Key = tuple[bytes, bytes]
"""(trace id, span id)."""


@dataclass(frozen=True)
class Seen:
    """A span: the service that made it, and in `causes` its parent and the spans that it links to."""

    service: str
    name: str
    key: Key
    causes: tuple[Key, ...]


@dataclass
class Collector:
    """A running collector. `endpoint` is a value for OTEL_EXPORTER_OTLP_ENDPOINT. `bodies` are the
    requests as they came."""

    endpoint: str = ""
    bodies: list[bytes] = field(default_factory=list)
    spans: dict[Key, Seen] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    key = (span.trace_id, span.span_id)
                    parents = [(span.trace_id, span.parent_span_id)] if span.parent_span_id else []
                    links = [(link.trace_id, link.span_id) for link in span.links]
                    service = attributes.get("service.name", "")
                    self.spans[key] = Seen(service, span.name, key, (*parents, *links))

    def following(self, start: Seen) -> list[Seen]:
        """`start` and all spans that it caused, directly or indirectly, by parents and links."""
        found = {start.key: start}
        while True:
            more = {
                span.key: span
                for span in list(self.spans.values())
                if span.key not in found and any(cause in found for cause in span.causes)
            }
            if not more:
                return list(found.values())
            found |= more


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port."""
    held = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            held.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield held
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
