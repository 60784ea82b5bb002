"""The endpoint of webhooks over real sockets: bodies that claim a length they do not have, that come
slowly, or that are too large, and secrets that are withdrawn meanwhile."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest

from infra.http.limits import ConnectionLimits
from infra.http.server import HttpServer
from producers.webhook.body import BodyLimits, BodyReader
from schemas.ids import delivery_stream
from tests.kit.application import Application, application

pytestmark = pytest.mark.postgres

SECRET = "a secret"
BODY = json.dumps({"ref": "refs/heads/main", "before": "a" * 40, "after": "b" * 40}).encode()
LIMITS = BodyLimits(most=64 << 10, free=1 << 10, permits=1, within_s=1.0)
HANG_S = 20.0


@dataclass
class Served:
    """The application behind a real server, and the connections to it."""

    app: Application
    port: int
    senders: list["Sender"] = field(default_factory=list)

    async def begin(self, body: bytes, *, length: int | None = None) -> "Sender":
        """Send the head of a signed delivery that claims `length` bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        signature = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        writer.write(
            (
                "POST /webhooks/sums HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n"
                f"X-GitHub-Event: push\r\nX-GitHub-Delivery: {uuid4()}\r\n"
                f"X-Hub-Signature-256: sha256={signature}\r\n\r\n"
            ).encode()
        )
        self.senders.append(Sender(reader, writer))
        return self.senders[-1]

    async def num_recorded(self) -> int:
        stream = delivery_stream("w-sums")
        return len((await self.app.services.log.load({stream: 0}))[stream])


@dataclass
class Sender:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def status(self) -> int:
        """The status of the answer."""
        line = await asyncio.wait_for(self.reader.readline(), HANG_S)
        return int(line.split()[1]) if line else 0

    async def is_closed(self) -> bool:
        """Whether the server ends the connection after the answer."""
        await asyncio.wait_for(self.reader.read(), HANG_S)
        return self.reader.at_eof()


@asynccontextmanager
async def serving(database_url: str, home: Path) -> AsyncIterator[Served]:
    async with application(database_url, home) as app:
        await app.services.readmodel.names.take("workspace", "sums", "w-sums")
        await app.services.connections.put_connection(
            "w-sums", forge="github", url="/srv/x.git", secret=SECRET
        )
        app.services.webhooks._reader = BodyReader(LIMITS)
        limits = ConnectionLimits(head_s=60, body_s=60)
        server = HttpServer(app.app, host="127.0.0.1", port=0, limits=limits, keep_alive_s=60)
        await server.listen()
        task = asyncio.ensure_future(server.serve())
        served = Served(app, server.port)
        yield served
        for sender in served.senders:
            sender.writer.close()
            await asyncio.wait([asyncio.ensure_future(sender.writer.wait_closed())])
        server.stop()
        await task


@pytest.fixture
async def served(database_url: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(database_url, tmp_path / "home") as made:
        yield made


async def test_a_body_that_is_shorter_than_it_claims_is_never_taken(served: Served) -> None:
    waits = await served.begin(BODY, length=len(BODY) + 1)
    waits.writer.write(BODY)
    gone = await served.begin(BODY, length=len(BODY) + 1)
    gone.writer.write(BODY)
    gone.writer.close()
    assert await waits.status() == 408
    assert await waits.is_closed()
    assert await served.num_recorded() == 0


async def test_a_slow_body_meets_its_deadline_however_steadily_it_comes(served: Served) -> None:
    slow = await served.begin(BODY)
    status = asyncio.ensure_future(slow.status())
    for byte in BODY * 100:
        slow.writer.write(bytes([byte]))
        await asyncio.wait([status], timeout=0.05)
        if status.done():
            break
    assert await status == 408
    assert await served.num_recorded() == 0


async def test_a_body_in_two_pieces_is_taken(served: Served) -> None:
    sender = await served.begin(BODY)
    sender.writer.write(BODY[:10])
    await asyncio.sleep(0.05)
    sender.writer.write(BODY[10:])
    assert await sender.status() == 202
    assert await served.num_recorded() == 1


async def test_a_body_that_declares_too_much_is_refused_before_it_is_read(served: Served) -> None:
    sender = await served.begin(BODY, length=LIMITS.most + 1)
    assert await sender.status() == 413
    assert await sender.is_closed()


async def test_large_bodies_share_permits_and_small_ones_need_none(served: Served) -> None:
    large = BODY + b" " * (2 * LIMITS.free)
    holder = await served.begin(large)
    holder.writer.write(large[: LIMITS.free + 10])
    await asyncio.sleep(0.1)
    waiter = await served.begin(large)
    waiter.writer.write(large)
    small = await served.begin(BODY)
    small.writer.write(BODY)
    assert await small.status() == 202
    assert await served.num_recorded() == 1
    holder.writer.write(large[LIMITS.free + 10 :])
    assert await holder.status() == 202
    assert await waiter.status() == 202


async def test_a_sender_that_leaves_gives_its_permit_back(served: Served) -> None:
    large = BODY + b" " * (2 * LIMITS.free)
    gone = await served.begin(large)
    gone.writer.write(large[: LIMITS.free + 10])
    await asyncio.sleep(0.1)
    gone.writer.close()
    sender = await served.begin(large)
    sender.writer.write(large)
    assert await sender.status() == 202


async def test_a_secret_that_is_withdrawn_during_a_slow_body_is_not_valid(
    database_url: str, tmp_path: Path
) -> None:
    async with serving(database_url, tmp_path / "home") as served:
        served.app.services.webhooks._reader = BodyReader(BodyLimits(within_s=HANG_S))
        sender = await served.begin(BODY)
        sender.writer.write(BODY[:10])
        await asyncio.sleep(0.1)
        await served.app.services.connections.rotate("w-sums", now=True)
        await asyncio.sleep(1.2)  # a lookup is remembered for a second
        sender.writer.write(BODY[10:])
        assert await sender.status() == 401
