"""The host of a rollout server: calls become attempts, and a server that is gone or blocked ends it."""

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.servers import hosting
from headrace.servers.attempts import AttemptFailed, ServedAttempt, ServerGrade
from headrace.servers.hosting import ServerHost
from headrace.servers.loopback import ServerAway

Make = Callable[[ServedAttempt], Awaitable[ServerGrade]]


class Host:
    """A host whose server is a function, and what it has sent."""

    def __init__(self, make: Make, *, answered_at: float = float("inf")) -> None:
        self.sent: list[dict[str, Any]] = []
        self.removed: list[str] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def end() -> str:
            return await self.ended

        program = SimpleNamespace(
            end=end,
            tail=lambda: "printed",
            written_files=lambda name: None,
            remove_files=self.removed.append,
            server=SimpleNamespace(answered_at=answered_at),
            artifacts=Path("/none"),
        )
        rollouts = SimpleNamespace(make=make)
        self._reader = asyncio.StreamReader()
        host = ServerHost(cast(Any, program), cast(Any, rollouts), send=self.sent.append, port=7)
        self.serving = asyncio.ensure_future(host.serve(self._reader))

    def call(self, name: str, **changes: object) -> None:
        """Send a call."""
        message = {
            "id": name,
            "deadline_s": 5.0,
            "prompt": [{"role": "user", "content": "hi"}],
            "label": "4",
            "metadata": {},
            "base_path": "/v1/samples/one",
            "api_key": "key",
            "agent_timeout_s": 1.0,
            "grader_timeout_s": 1.0,
            **changes,
        }
        data = json.dumps(message).encode()
        self._reader.feed_data(struct.pack(">I", len(data)) + data)

    async def answer(self) -> dict[str, Any]:
        """The next message that it sends."""
        async with asyncio.timeout(30):
            while not self.sent:
                await asyncio.sleep(0.001)
        return self.sent.pop(0)

    async def over(self) -> list[dict[str, Any]]:
        """Wait until it ends. Returns what it has sent."""
        async with asyncio.timeout(30):
            await self.serving
        return self.sent


async def test_a_call_becomes_an_attempt_and_its_grade_comes_back() -> None:
    made: list[ServedAttempt] = []

    async def make(attempt: ServedAttempt) -> ServerGrade:
        made.append(attempt)
        return ServerGrade(0.5)

    host = Host(make)
    host.call("a")
    grade = {"index": 0, "reward": 0.5, "parts": {}, "error": None}
    assert await host.answer() == {"id": "a", "grade": grade}
    assert made[0].chat_url == "http://127.0.0.1:7/v1/samples/one"
    assert (made[0].name, made[0].label, made[0].api_key) == ("a", "4", "key")
    host.ended.set_result("it ended")
    assert await host.over() == [{"ended": "it ended"}]


async def test_a_failed_attempt_comes_with_what_was_printed() -> None:
    async def make(attempt: ServedAttempt) -> ServerGrade:
        raise AttemptFailed("raised", "as asked")

    host = Host(make)
    host.call("a")
    answer = await host.answer()
    assert (answer["category"], answer["error"]) == ("raised", "as asked")
    assert answer["output"]["stdout"] == "printed"
    host.serving.cancel()


async def test_a_cancelled_call_is_answered_by_nothing() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def make(attempt: ServedAttempt) -> ServerGrade:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return ServerGrade(0.0)

    host = Host(make)
    host.call("a")
    await begun.wait()
    host.call("a", cancel=True)
    async with asyncio.timeout(30):
        await cancelled.wait()
    assert host.sent == []
    host.serving.cancel()


async def test_a_server_that_is_gone_ends_the_host() -> None:
    async def make(attempt: ServedAttempt) -> ServerGrade:
        raise ServerAway("it takes no rollouts: 503")

    host = Host(make)
    host.call("a")
    (sent,) = await host.over()
    assert sent["ended"].startswith(
        "the rollout server: it takes no rollouts: 503; its output ends"
    )


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
async def test_a_server_that_is_blocked_fails_the_only_call_or_ends_all(
    names: tuple[str, ...],
) -> None:
    """With several calls nobody knows which of them blocks it, so each is made again, alone."""

    async def make(attempt: ServedAttempt) -> ServerGrade:
        await asyncio.sleep(3600)
        return ServerGrade(0.0)

    host = Host(make, answered_at=float("-inf"))
    for name in names:
        host.call(name, deadline_s=0.05)
    sent = await host.over()
    assert "answers nothing" in sent[-1]["ended"]
    timeouts = [message for message in sent if message.get("category") == "timeout"]
    assert len(timeouts) == (1 if len(names) == 1 else 0)


async def test_a_slow_attempt_at_a_server_that_answers_fails_alone() -> None:
    async def make(attempt: ServedAttempt) -> ServerGrade:
        await asyncio.sleep(3600)
        return ServerGrade(0.0)

    host = Host(make)
    host.call("a", deadline_s=0.05)
    answer = await host.answer()
    assert answer["category"] == "timeout"
    assert not host.serving.done()
    host.serving.cancel()


async def test_the_files_of_attempts_are_removed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def make(attempt: ServedAttempt) -> ServerGrade:
        return ServerGrade(0.0)

    monkeypatch.setattr(hosting, "MOST_KEPT", 1)
    host = Host(make)
    for name in ("run.0", "run.1", "run.2"):
        host.call(name)
        await host.answer()
    await asyncio.sleep(0)
    assert host.removed == ["run-0", "run-1"]
    host.serving.cancel()
