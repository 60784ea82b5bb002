"""The server at HEADRACE_KAFKA is probed before anything relies on it. A server that is not Kafka
ends the process with a message that says so; a Kafka that does not answer is waited for."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.adapters import open_backend
from infra.operations.local.free_port import free_port
from infra.settings.kafka import KafkaSettings
from infra.settings.settings import Settings
from infra.spine.bus.kafka import probe as probing
from infra.spine.bus.kafka.probe import CORRELATION, probe
from schemas.errors import InvalidConfig, TransientError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(struct.pack(">iih", 10, CORRELATION, 0) + bytes(4))


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The address of a server that sends this response and closes the connection."""
    calls = set[asyncio.Task[None] | None]()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.add(asyncio.current_task())
        await answer(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(answered, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*(call for call in calls if call))


@pytest.mark.parametrize(
    ("answer", "says"), [(web, "answers in another protocol"), (hangs_up, "closes the connection")]
)
async def test_an_address_without_kafka_is_named_with_advice(answer: Answer, says: str) -> None:
    async with serving(answer) as address:
        with pytest.raises(InvalidConfig, match=rf"{address} {says}.*Name Kafka's own listener"):
            await probe(KafkaSettings((address,)))


async def test_a_listener_without_tls_where_tls_was_meant_is_named() -> None:
    async with serving(web) as address:
        with pytest.raises(InvalidConfig, match=r"does not agree on TLS.*SECURITY_PROTOCOL"):
            await probe(KafkaSettings((address,), protocol="SSL"))


async def test_nobody_or_silence_is_a_kafka_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "TIMEOUT_S", 0.2)
    with pytest.raises(TransientError, match="no Kafka answers at HEADRACE_KAFKA"):
        await probe(KafkaSettings((f"127.0.0.1:{free_port()}",)))
    async with serving(silent) as address:
        with pytest.raises(TransientError, match="no answer"):
            await probe(KafkaSettings((address,)))


async def test_one_kafka_among_the_servers_is_enough() -> None:
    async with serving(web) as other, serving(broker) as address:
        await probe(KafkaSettings((other, f"127.0.0.1:{free_port()}", address)))


async def test_a_process_does_not_start_with_what_is_no_kafka(tmp_path: Path) -> None:
    async with serving(web) as address:
        settings = Settings.load(
            {
                "HEADRACE_HOME": str(tmp_path),
                "HEADRACE_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x",
                "HEADRACE_KAFKA": address,
            }
        )
        with pytest.raises(InvalidConfig, match="what answers there is not Kafka"):
            async with open_backend(settings):
                pass
