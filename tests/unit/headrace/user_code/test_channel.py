"""Messages arrive whole and in order, and those of one turn of the loop share a write."""

import asyncio
import json
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.user_code.user_code_host import Channel

MANY = 200


@contextmanager
def pipe() -> Iterator[tuple[int, Channel]]:
    reading, writing = os.pipe()
    try:
        yield reading, Channel(writing)
    finally:
        os.close(reading)
        os.close(writing)


def messages(data: bytes) -> list[dict[str, object]]:
    found = []
    while data:
        size = struct.unpack(">I", data[:4])[0]
        found.append(json.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


def test_messages_of_one_turn_share_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        writes.append(len(data))
        return write(descriptor, data)

    async def post(channel: Channel) -> None:
        for number in range(MANY):
            channel.post({"id": number})
        await asyncio.sleep(0)

    with pipe() as (reading, channel):
        monkeypatch.setattr(os, "write", counted)
        asyncio.run(post(channel))
        assert messages(os.read(reading, 1 << 16)) == [{"id": number} for number in range(MANY)]
    assert len(writes) == 1


def test_a_message_that_is_sent_now_comes_after_those_that_are_posted() -> None:
    async def post_and_send(channel: Channel) -> None:
        channel.post({"id": 1})
        channel.send({"id": 2})
        channel.post({"id": 3})
        await asyncio.sleep(0)

    with pipe() as (reading, channel):
        asyncio.run(post_and_send(channel))
        assert messages(os.read(reading, 1 << 16)) == [{"id": 1}, {"id": 2}, {"id": 3}]


def test_no_message_is_lost_when_another_thread_sends() -> None:
    read: list[bytes] = []

    async def post(channel: Channel) -> None:
        def send() -> None:
            for number in range(MANY):
                channel.send({"sent": number})

        sender = threading.Thread(target=send)
        sender.start()
        for number in range(MANY):
            channel.post({"posted": number})
            await asyncio.sleep(0)
        await asyncio.to_thread(sender.join)
        channel.send({"last": True})

    def drain(descriptor: int) -> None:
        while data := os.read(descriptor, 1 << 16):
            read.append(data)

    reading, writing = os.pipe()
    reader = threading.Thread(target=drain, args=(reading,))
    reader.start()
    asyncio.run(post(Channel(writing)))
    os.close(writing)
    reader.join()
    os.close(reading)
    found = messages(b"".join(read))
    assert [one for one in found if "sent" in one] == [{"sent": n} for n in range(MANY)]
    assert [one for one in found if "posted" in one] == [{"posted": n} for n in range(MANY)]
    assert found[-1] == {"last": True}
