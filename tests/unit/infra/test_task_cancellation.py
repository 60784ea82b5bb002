"""A cancelled task ends even if its first cancellation is lost: a driver swallowed it, or turned it
into an error that says the database is unavailable."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra import task_cancellation
from infra.spine.memory.event_log import MemoryEffects
from infra.spine.ports.effects import Claimed
from infra.spine.postgres import errors
from infra.spine.postgres.errors import DatabaseUnavailable, reconnecting, translating_errors
from infra.spine.postgres.notify import Wakeup
from infra.spine.runtime import claims, performer
from infra.task_cancellation import end, go_on
from tests.kit.hosting import Bench, Script, consumer

Swallow = Callable[[], Awaitable[None]]


async def as_away() -> None:
    """A query that is cancelled on the server when its task ends: the response is an error like any
    other."""
    with translating_errors():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise asyncpg.QueryCanceledError("canceling statement due to user request") from None


async def as_away_of_an_adapter() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise DatabaseUnavailable("the database does not answer in time; try again") from None


async def as_an_answer() -> None:
    """As asyncio.wait_for of Python 3.11 behaves when the response arrived in the same turn of the
    event loop."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "PAUSE_S", 0.0)
    monkeypatch.setattr(task_cancellation, "AGAIN_S", 0.05)


@pytest.mark.parametrize("swallow", [as_away, as_away_of_an_adapter, as_an_answer])
async def test_a_loop_that_lost_its_cancellation_ends(swallow: Swallow) -> None:
    wakeup, turns = Wakeup(), 0

    async def loop() -> None:
        nonlocal turns
        while True:
            turns += 1
            await swallow()
            await wakeup.wait(0.0)

    task = asyncio.ensure_future(reconnecting(loop))
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=10)
    assert done
    assert task.cancelled()
    assert turns == 1, "it does not begin again"


@pytest.mark.parametrize(
    "swallow",
    [
        as_away,
        as_away_of_an_adapter,
        pytest.param(
            as_an_answer,
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11, 3),
                reason="a later timeout is cancelled there (gh-102780)",
            ),
        ),
    ],
)
async def test_twin_a_loop_that_does_not_ask_goes_on(swallow: Swallow) -> None:
    wakeup, again = Wakeup(), asyncio.Event()
    turns = 0

    async def loop() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 2:
                again.set()
            await swallow()
            await wakeup.wait(0.0)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("errors", "notify"):
            patch.setattr(f"infra.spine.postgres.{module}.go_on", lambda: None)
        task = asyncio.ensure_future(reconnecting(loop))
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(10):
            await again.wait()
    assert again.is_set(), "told to end, and at work again"
    assert await end([task], within_s=10)


async def test_a_task_is_told_to_end_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    told = 0

    async def deaf(times: int) -> None:
        nonlocal told
        while told < times:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told += 1

    task = asyncio.ensure_future(deaf(3))
    await asyncio.sleep(0)
    assert await end([task])
    assert told == 3
    task = asyncio.ensure_future(deaf(1_000_000))
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        assert not await end([task], within_s=0.05)
    assert "does not end" in caplog.text
    told = 1_000_000
    assert await end([task])


async def test_a_task_that_nobody_told_to_end_goes_on() -> None:
    go_on()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.0):
            await asyncio.sleep(10)
    go_on()


@pytest.mark.parametrize("name", ["claim", "next_due_s", "holding"])
@pytest.mark.parametrize("swallow", [as_away_of_an_adapter, as_an_answer])
async def test_a_runtime_ends_whose_driver_swallows_the_first_cancellation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, swallow: Swallow
) -> None:
    reached = asyncio.Event()
    original = getattr(MemoryEffects, name)

    async def stalled(self: MemoryEffects, *arguments: object, **more: Any) -> object:
        reached.set()
        await swallow()
        return await original(self, *arguments, **more)

    monkeypatch.setattr(MemoryEffects, name, stalled)
    bench = Bench(tmp_path, [consumer(Script())])
    async with asyncio.timeout(60), bench.running():
        await reached.wait()


async def test_a_runtime_leaves_an_effect_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the effect does with its cancellation, its claim is released and the process
    exits."""
    monkeypatch.setattr(task_cancellation, "END_S", 0.2)
    bench = Bench(tmp_path, [consumer(Script(asks=True))])
    at_work, over = asyncio.Event(), asyncio.Event()

    async def deaf(effect: object, ports: object) -> object:
        at_work.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        raise DatabaseUnavailable("too late")

    object.__setattr__(bench.consumers[0], "perform", deaf)
    await bench.warn("r", 1)
    async with asyncio.timeout(60), bench.running():
        await at_work.wait()
    (held,) = bench.world.effects.values()
    assert (held.worker, held.attempts) == (None, 0)
    over.set()


async def test_a_heartbeat_outlives_an_absence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [consumer(Script(asks=True))])
    at_work = asyncio.Event()

    async def stands(effect: object, ports: object) -> None:
        at_work.set()
        await asyncio.Event().wait()

    object.__setattr__(bench.consumers[0], "perform", stands)
    await bench.warn("r", 1)
    async with bench.running() as started:
        await at_work.wait()
        bench.effects.before["gates"] = 1
        await started.apply_gates()
        assert bench.effects.before["gates"] == 0


async def test_claims_that_nobody_knows_of_are_found_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason does not matter: here somebody writes our worker's name into a row."""
    monkeypatch.setattr(claims, "CHECK_S", 0.0)
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.02)
    bench = Bench(tmp_path, [consumer(Script(asks=True))])
    await _stolen(bench, lambda: len(bench.seen("r")) == 1, within_s=60)
    assert "nobody here knew of" in caplog.text


async def test_twin_without_the_check_such_a_claim_is_held_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.02)
    bench = Bench(tmp_path, [consumer(Script(asks=True))])
    with pytest.raises(TimeoutError):
        await _stolen(bench, lambda: len(bench.seen("r")) == 1, within_s=1)


async def _stolen(bench: Bench, done: Callable[[], bool], *, within_s: float) -> None:
    claim = MemoryEffects.claim
    nothing = asyncio.Event()

    async def late(self: MemoryEffects, *arguments: object, **more: Any) -> object:
        found: list[Claimed] = list(await claim(self, *arguments, **more))  # type: ignore[arg-type]  # as given
        if not nothing.is_set() and found:
            nothing.set()
            return []
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryEffects, "claim", late)
        async with bench.running() as started:
            started._committer._drafter._reserve = lambda effect: False
            await bench.warn("r", 1)
            await bench.until(done, within_s=within_s)


async def test_work_that_is_not_ours_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CHECK_S", 0.0)
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.02)
    bench = Bench(tmp_path, [consumer(Script(asks=True))])
    at_work, ended = asyncio.Event(), asyncio.Event()

    async def stands(effect: object, ports: object) -> None:
        at_work.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    object.__setattr__(bench.consumers[0], "perform", stands)
    await bench.warn("r", 1)
    async with asyncio.timeout(60), bench.running():
        await at_work.wait()
        bench.world.effects.clear()
        await ended.wait()
