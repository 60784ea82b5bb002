"""Tracing does no harm, whatever its collector does."""

import json
import os
import subprocess
import sys

from infra.operations.local.free_port import free_port

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

LOGGING = """
import logging, httpx
from infra import telemetry
from infra.settings.settings import Settings
telemetry.setup(Settings.load({}), service="test")
httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))).get("http://model/")
logging.getLogger("infra").info("started")
"""


def test_requests_of_the_http_client_are_not_logged() -> None:
    """A deployment under load would otherwise fill the log of the control process."""
    ended = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True, timeout=60
    )
    assert [json.loads(line)["message"] for line in ended.stderr.splitlines()] == ["started"]


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
