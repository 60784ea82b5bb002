"""Options that all Kafka clients of this process share, and a limit on how often they log."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable
from typing import Any

from aiokafka.errors import KafkaError

from infra.settings.kafka import KafkaSettings

REQUEST_MS = 5000
"""How long a request, or a record to be sent, waits for a broker before it fails."""

STOP_S = 3.0
"""How long a client may take to close."""

REPEAT_S = 30.0
CLIENT = "aiokafka"

logger = logging.getLogger(__name__)


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """Keyword arguments of all aiokafka clients. Raises OSError when a PEM file cannot be read."""
    return {
        "bootstrap_servers": list(settings.servers),
        "client_id": "headrace",
        "request_timeout_ms": REQUEST_MS,
        "metadata_max_age_ms": 10_000,
        "security_protocol": settings.protocol,
        "ssl_context": ssl_context_for(settings),
        "sasl_mechanism": settings.mechanism,
        "sasl_plain_username": settings.username,
        "sasl_plain_password": settings.password,
    }


async def close_client(closing: Awaitable[None]) -> bool:
    """Close a client within STOP_S. Returns False if that failed and connections may still be open."""
    try:
        async with asyncio.timeout(STOP_S):
            await closing
    except (KafkaError, TimeoutError) as error:
        logger.info("a Kafka client did not close in order: %s", error)
        return False
    return True


def ssl_context_for(settings: KafkaSettings) -> ssl.SSLContext | None:
    """The TLS settings, or None without TLS. Certificates are checked, against the configured
    authority if there is one."""
    if not settings.tls:
        return None
    made = ssl.create_default_context(cafile=settings.ca)
    if settings.certificate is not None:
        made.load_cert_chain(settings.certificate, settings.key)
    return made


class RepeatFilter(logging.Filter):
    """Lets the same message of the client through once per REPEAT_S. Without a broker the client
    repeats its messages many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._seen.get(record.msg, -REPEAT_S) < REPEAT_S:
            return False
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[record.msg] = now
        return True


def limit_client_logging() -> None:
    """Add `RepeatFilter` to every logger of the client, and drop messages below warnings."""
    logging.getLogger(CLIENT).setLevel(logging.WARNING)
    rarely = RepeatFilter()
    below = [name for name in logging.root.manager.loggerDict if name.startswith(f"{CLIENT}.")]
    for logger in map(logging.getLogger, (CLIENT, *below)):
        if not any(isinstance(held, RepeatFilter) for held in logger.filters):
            logger.addFilter(rarely)
