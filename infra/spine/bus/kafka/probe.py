"""Checks whether an address is a Kafka, something else, or nothing, before anything relies on it.

It sends one request that every broker answers before authentication (ApiVersions), over a plain socket
or TLS. That needs no client library, so the supervisor and `headrace doctor` can use it too.
"""

import asyncio
import ssl
import struct

from infra.settings.kafka import PREFIX, KafkaSettings
from infra.spine.bus.kafka.connect import ssl_context_for
from schemas.errors import InvalidConfig, TransientError

TIMEOUT_S = 5.0
API_VERSIONS = 18
CORRELATION = 0x48454144
LARGEST = 1 << 20


class NotKafka(Exception):
    """Something answered, but not like Kafka."""


async def probe(settings: KafkaSettings) -> None:
    """Return when one of the servers is a Kafka.

    Raises InvalidConfig when something else answers there, because waiting does not help, and
    TransientError when nothing answers, because a broker may be down at any time.
    """
    silent, strange = [], []
    for server in settings.servers:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await _ask(settings, server)
        except NotKafka as error:
            strange.append(f"{server} {error}")
        except (OSError, TimeoutError) as error:
            silent.append(f"{server} ({str(error) or 'no answer'})")
        else:
            return
    if strange:
        raise InvalidConfig(
            f"{PREFIX} holds {settings.address!r}, but what answers there is not Kafka, or not by "
            f"{settings.protocol}: {'; '.join(strange)}. Name Kafka's own listener, "
            f"and set {PREFIX}_SECURITY_PROTOCOL to the protocol of that listener"
        )
    raise TransientError(f"no Kafka answers at {PREFIX}: {', '.join(silent)}")


async def _ask(settings: KafkaSettings, server: str) -> None:
    host, _, port = server.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=ssl_context_for(settings)
        )
    except ssl.SSLError as error:
        raise NotKafka(f"does not agree on TLS ({error.reason or error})") from error
    try:
        writer.write(_request())
        await writer.drain()
        await _check(reader)
    finally:
        writer.close()


def _request() -> bytes:
    client = b"headrace"
    body = struct.pack(">hhih", API_VERSIONS, 0, CORRELATION, len(client)) + client
    return struct.pack(">i", len(body)) + body


async def _check(reader: asyncio.StreamReader) -> None:
    try:
        size, correlation = struct.unpack(">ii", await reader.readexactly(8))
    except asyncio.IncompleteReadError as error:
        raise NotKafka("closes the connection on a Kafka request") from error
    if correlation != CORRELATION or not 4 < size < LARGEST:
        raise NotKafka("answers in another protocol")
