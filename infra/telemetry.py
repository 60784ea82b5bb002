"""Logging, and tracing if OpenTelemetry's own variables name an endpoint. A dead collector does no harm.

A consumer's span is *linked* to the span that caused its message and not nested under it, because a
message may be handled much later and more than once. The events and effects of a span carry its context,
so a trace leads from a submit to every span down to the last checkpoint. The constants below hold all
span names.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from infra.settings.settings import Settings
from schemas.secrets.masking import Masks
from schemas.secrets.redact import redact

TRACER = "headrace"
PARENT = "traceparent"

COMMAND = "headrace {method} {path}"
REQUEST = "{method} {path}"
DECIDE = "{consumers} decide"
PERFORM = "{consumer} perform {effect}"

FLUSH_S = 2.0
"""How long a process waits for its collector when it ends."""

_propagator = TraceContextTextMapPropagator()
_exporting = False

HTTP_CLIENT = "httpx"
"""Logs the address of each request, as often as clients ask a deployment."""

MOST_MASKS = 64
"""How many different masks log lines are masked with."""

_masks: tuple[Masks, ...] = ()


@contextmanager
def span(
    name: str, *, parent: str | None = None, links: Iterable[str | None] = ()
) -> Iterator[str | None]:
    """Open a span around the block, under the context `parent` (a traceparent) and linked to the
    contexts `links`. Yields its own traceparent. While tracing is off it yields None and makes no
    span."""
    if not _exporting:
        yield None
        return
    found = [_context(link) for link in dict.fromkeys(links) if link is not None]
    with trace.get_tracer(TRACER).start_as_current_span(
        name,
        context=_propagator.extract({PARENT: parent}) if parent else None,
        links=[trace.Link(context) for context in found if context.is_valid],
    ):
        yield traceparent()


def _context(link: str) -> trace.SpanContext:
    return trace.get_current_span(_propagator.extract({PARENT: link})).get_span_context()


def traceparent() -> str | None:
    """Return the context of the current span, to send with an event or a request; None without a
    span."""
    if not _exporting:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(PARENT)


def setup(settings: Settings, *, service: str) -> None:
    """Log JSON lines to stderr, and start tracing if the settings ask for it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger(HTTP_CLIENT).setLevel(logging.WARNING)
    if settings.telemetry:
        export(service)


def mask_logs(masks: Masks) -> None:
    """Mask these secrets in every later log line of this process. It is the last line of defence: no
    log statement is given a secret. The last MOST_MASKS are remembered."""
    global _masks
    if masks not in _masks:
        _masks = (*_masks[1 - MOST_MASKS :], masks)


def _mask(text: str) -> str:
    for masks in _masks:
        text = masks.text(text)
    return text


def export(service: str) -> None:
    """Send spans to the collector that OpenTelemetry's variables name, from a background thread. A
    process has one provider, so a second call only resumes."""
    global _exporting
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        _exporting = True
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": f"headrace-{service}"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    _exporting = True


def close() -> None:
    """Send the remaining spans, and wait at most FLUSH_S for the collector. OpenTelemetry has a limit
    of its own and does not obey it, so a thread waits for a collector that is dead."""
    global _exporting
    flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if _exporting and flush is not None:
        flushing = threading.Thread(target=flush, name="flush", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
    _exporting = False


class JsonLines(logging.Formatter):
    """One JSON object per line, with the secrets that `mask_logs` was given masked."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            line["trace"] = redact(self.formatException(record.exc_info))
        return _mask(json.dumps(line))


def prometheus(values: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
    """Return the Prometheus text of {metric: (help, {labels or "": value})}. All metrics are gauges."""
    lines = []
    for name, (meaning, samples) in values.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
        lines += [
            f"{name}{{{labels}}} {v}" if labels else f"{name} {v}" for labels, v in samples.items()
        ]
    return "\n".join(lines) + "\n"
