"""Tracing does no harm, whatever its collector does."""

import os
import subprocess
import sys

from infra.local.free_port import free_port

PROGRAM = """
import time
from opentelemetry import trace
from infra import telemetry
telemetry.export("test")
with trace.get_tracer("t").start_as_current_span("a"):
    pass
began = time.monotonic()
telemetry.close()
print(time.monotonic() - began)
"""


def test_a_process_does_not_wait_for_a_dead_collector() -> None:
    """OpenTelemetry tries it again for ten seconds, whatever limit `force_flush` gets."""
    dead = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **dead},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert float(ended.stdout) < 5
