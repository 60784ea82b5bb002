"""Tracing, off unless OpenTelemetry's own variables name an endpoint. A dead collector changes nothing.

Spans of consumers are *linked* to the span that caused their message, not nested under it: a message
may be handled long after, and more than once. All names live in the table below.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from infra.settings import Settings

TRACER = "headrace"
PARENT = "traceparent"
LINKED = "headrace.linked"

_propagator = TraceContextTextMapPropagator()


@contextmanager
def span(
    name: str, *, link: str | None = None, attributes: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A span, linked to the context `link` (a traceparent) when there is one."""
    links = []
    if link is not None:
        context = trace.get_current_span(_propagator.extract({PARENT: link})).get_span_context()
        links = [trace.Link(context)] if context.is_valid else []
    with trace.get_tracer(TRACER).start_as_current_span(
        name, links=links, attributes=dict(attributes or {})
    ):
        yield


def traceparent() -> str | None:
    """The current span's context, to travel with an event."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(PARENT)


def setup(settings: Settings, *, service: str) -> None:
    """Logging as JSON lines on stderr; tracing if it is wanted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if settings.telemetry:
        _export(service)


def _export(service: str) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": f"headrace-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def prometheus(values: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
    """Prometheus text: {metric: (help, {labels or "": value})}, all of them gauges."""
    lines = []
    for name, (meaning, samples) in values.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
        lines += [
            f"{name}{{{labels}}} {v}" if labels else f"{name} {v}" for labels, v in samples.items()
        ]
    return "\n".join(lines) + "\n"
