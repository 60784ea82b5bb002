"""What every client of Kafka in this process is told, and their logging kept readable."""

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
"""How long a client may take to hang up."""

REPEAT_S = 30.0
CLIENT = "aiokafka"

logger = logging.getLogger(__name__)


def options(settings: KafkaSettings) -> dict[str, Any]:
    """Keyword arguments of all aiokafka clients. Raises OSError when a PEM file cannot be read."""
    return {
        "bootstrap_servers": list(settings.servers),
        "client_id": "headrace",
        "request_timeout_ms": REQUEST_MS,
        "metadata_max_age_ms": 10_000,
        "security_protocol": settings.protocol,
        "ssl_context": context(settings),
        "sasl_mechanism": settings.mechanism,
        "sasl_plain_username": settings.username,
        "sasl_plain_password": settings.password,
    }


async def hang_up(closing: Awaitable[None]) -> bool:
    """Close, within reason. False: it did not come to its end, and what it had not reached is open."""
    try:
        async with asyncio.timeout(STOP_S):
            await closing
    except (KafkaError, TimeoutError) as error:
        logger.info("a connection to Kafka was not closed in order: %s", error)
        return False
    return True


def context(settings: KafkaSettings) -> ssl.SSLContext | None:
    """Certificates are checked, against our own authority when one is named."""
    if not settings.tls:
        return None
    made = ssl.create_default_context(cafile=settings.ca)
    if settings.certificate is not None:
        made.load_cert_chain(settings.certificate, settings.key)
    return made


class Rarely(logging.Filter):
    """Lets the same complaint of the client through once in a while: while a broker is away it
    repeats them many times a second."""

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


def quieten() -> None:
    """Put `Rarely` before every logger of the client, and leave out its small talk."""
    logging.getLogger(CLIENT).setLevel(logging.WARNING)
    rarely = Rarely()
    below = [name for name in logging.root.manager.loggerDict if name.startswith(f"{CLIENT}.")]
    for logger in map(logging.getLogger, (CLIENT, *below)):
        if not any(isinstance(held, Rarely) for held in logger.filters):
            logger.addFilter(rarely)
