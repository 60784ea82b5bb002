"""Errors whose text no database accepts lose no effect: attempts are counted, and the last error
becomes the outcome. Postgres only, because the in-memory twin accepts any text."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest

from infra.spine.postgres.event_log import PostgresLog
from infra.spine.postgres.pool import Database
from infra.spine.runtime import attempt, performer
from infra.spine.runtime.consumer import AnyConsumer, Decision, Meta
from schemas.effects import Failed
from schemas.errors import FailureCategory, HeadraceError, Refused, UserCodeError
from schemas.events import CheckpointFailed, RunWarned
from schemas.ids import checkpoint_stream
from schemas.text import describe_error, plain
from tests.kit.hosting import Fetched, Script, consumer
from tests.kit.on_postgres import working

pytestmark = pytest.mark.postgres

TEXTS = ("a NUL \0 in it", "half a pair \ud83d of surrogates", "\x1b[31mred\x07")


class Unsayable(Exception):
    """An error that cannot be converted to text."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def failing(error: Callable[[], Exception]) -> AnyConsumer:
    """A consumer whose effect always raises; the outcome is recorded in its stream."""
    script = Script(asks=True)
    plain_one = consumer(script)

    async def perform(effect: object, ports: object) -> None:
        script.performed.append("")
        raise error()

    def handle(state: int, message: Any, meta: Meta) -> Decision:
        if isinstance(message, Failed):
            told = CheckpointFailed(
                run=message.effect.run_id, step=len(script.performed), message=message.message
            )
            return Decision(events=(told,))
        assert not isinstance(message, Fetched)
        return plain_one.handle(state, message, meta)

    return replace(plain_one, perform=perform, handle=handle)


async def outcome(log: PostgresLog, run: str) -> CheckpointFailed:
    """The recorded outcome of this run's effect."""
    async with asyncio.timeout(60):
        while True:
            found = await log.load({checkpoint_stream(run): 0})
            for recorded in found[checkpoint_stream(run)]:
                return cast("CheckpointFailed", recorded.event)
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    monkeypatch.setattr("infra.spine.runtime.attempt.ATTEMPTS", 3)
    # pytest cannot send captured lines with half a surrogate pair to another process (the log itself is
    # JSON in ASCII).
    for name in ("infra.spine.runtime.attempt", "infra.spine.runtime.performer"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.mark.parametrize("kind", [ValueError, UserCodeError, Refused, Unsayable])
@pytest.mark.parametrize("text", TEXTS)
async def test_an_error_of_any_text_ends_as_an_outcome(
    kind: type[Exception], text: str, database: Database, tmp_path: Path
) -> None:
    def error() -> Exception:
        if kind is UserCodeError:
            return UserCodeError(FailureCategory.VALIDATION, text)
        return kind(text)

    run = uuid4().hex
    async with working(failing(error), database, tmp_path) as (log, _):
        await log.append([RunWarned(run=run, step=1, message="look")], cause=uuid4())
        told = await outcome(log, run)
    assert told.step == (1 if issubclass(kind, HeadraceError) else 3)
    assert told.message.removeprefix("ValueError: ") in (plain(text), describe_error(Unsayable()))


async def test_a_performer_that_fails_beside_the_attempt_gives_back_and_goes_on(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = 0
    original = attempt.perform_once

    async def broken(*arguments: Any) -> Any:
        nonlocal times
        times += 1
        if times < 4:
            raise AssertionError("nobody thought \0 of this")
        return await original(*arguments)

    monkeypatch.setattr(performer, "perform_once", broken)
    run = uuid4().hex
    async with working(failing(lambda: Refused("no")), database, tmp_path) as (log, _):
        await log.append([RunWarned(run=run, step=1, message="look")], cause=uuid4())
        await outcome(log, run)
    assert times == 4


async def test_a_claim_that_cannot_be_released_is_found_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin of cleaning the text: Postgres rejects it, and still the effect is not lost."""
    monkeypatch.setattr("infra.spine.postgres.effects.plain", lambda text: text)
    monkeypatch.setattr("infra.spine.runtime.attempt.describe_error", str)
    times = 0

    def error() -> Exception:
        nonlocal times
        times += 1
        return ValueError(TEXTS[0]) if times < 3 else Refused("no")

    run = uuid4().hex
    async with working(failing(error), database, tmp_path) as (log, _):
        await log.append([RunWarned(run=run, step=1, message="look")], cause=uuid4())
        await outcome(log, run)
    assert times == 3
