"""An effect that is cancelled although this process did not give it up keeps its outcome, or is tried
again. It is never dropped."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.spine.runtime import attempt, claims, performer
from infra.spine.runtime.consumer import Decision, Meta
from schemas.effects import Failed, FetchCommit, Outcome
from schemas.errors import Refused
from schemas.events import CheckpointFailed
from tests.kit.hosting import Bench, Fetched, Script, consumer

Perform = Callable[[FetchCommit, object], Awaitable[Outcome]]


async def leave_a_cancellation(asked: FetchCommit, ports: object) -> Fetched:
    """As `asyncio.TaskGroup` of Python 3.11 does."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return Fetched(asked)
    raise AssertionError("it was not cancelled")


async def refuse_after_a_cancellation(asked: FetchCommit, ports: object) -> Fetched:
    await leave_a_cancellation(asked, ports)
    raise Refused("the tree of the commit is hostile")


async def fail_in_a_group(asked: FetchCommit, ports: object) -> Fetched:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise Refused("the tree of the commit is hostile")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return Fetched(asked)


async def cancel_itself(asked: FetchCommit, ports: object) -> Fetched:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    raise AssertionError("it was not cancelled")


class Once:
    """Cancels the first attempts, and then has an outcome."""

    def __init__(self, times: int) -> None:
        self.attempts = 0
        self.times = times

    async def __call__(self, asked: FetchCommit, ports: object) -> Fetched:
        self.attempts += 1
        if self.attempts <= self.times:
            return await cancel_itself(asked, ports)
        return Fetched(asked)


def bench_of(home: Path, perform: Perform, outcomes: list[Outcome]) -> Bench:
    scripted = consumer(Script(asks=True, on_outcome=outcomes.append))
    handle = scripted.handle

    def failed_too(state: int, message: Fetched | Failed, meta: Meta) -> Decision:
        if isinstance(message, Failed):
            outcomes.append(message)
            assert isinstance(message.effect, FetchCommit)
            message = Fetched(message.effect)
        return handle(state, message, meta)

    return Bench(home, [replace(scripted, perform=perform, handle=failed_too)])


async def ends(bench: Bench, *, within_s: float = 60.0) -> None:
    def is_over() -> bool:
        bench.world.advance(1.0)
        runtime._performer.wake()
        counted = any(isinstance(event, CheckpointFailed) for event in bench.told())
        return counted and not bench.world.effects

    await bench.warn("r", 1)
    async with bench.running() as runtime:
        await bench.until(is_over, within_s=within_s)
        assert not runtime._claims.tasks


@pytest.mark.parametrize(
    "perform", [leave_a_cancellation, refuse_after_a_cancellation, fail_in_a_group]
)
async def test_an_outcome_counts_although_a_cancellation_is_left(
    tmp_path: Path, perform: Perform
) -> None:
    outcomes: list[Outcome] = []
    await ends(bench_of(tmp_path, perform, outcomes))
    assert len(outcomes) in (1, 2)  # a failure is told to `handle` as both
    if perform is not leave_a_cancellation:
        assert isinstance(outcomes[0], Failed)
        assert outcomes[0].message == "the tree of the commit is hostile"


async def test_twin_a_check_of_the_count_alone_drops_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims.Claims, "is_given_up", lambda self, claimed: True)
    with pytest.raises(TimeoutError):
        await ends(bench_of(tmp_path, leave_a_cancellation, []), within_s=1)


async def test_an_effect_that_nobody_cancelled_is_logged_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: list[Outcome] = []
    once = Once(1)
    with caplog.at_level(logging.WARNING):
        await ends(bench_of(tmp_path, once, outcomes))
    assert once.attempts == 2
    assert [type(outcome) for outcome in outcomes] == [Fetched]
    assert "was cancelled" in caplog.text


async def test_an_effect_that_is_cancelled_each_time_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    monkeypatch.setattr(attempt, "ATTEMPTS", 2)
    outcomes: list[Outcome] = []
    await ends(bench_of(tmp_path, Once(1_000), outcomes))
    assert isinstance(outcomes[0], Failed)
    assert "was cancelled" in outcomes[0].message


async def test_an_effect_that_the_process_gives_up_is_released(tmp_path: Path) -> None:
    at_work = asyncio.Event()

    async def stand(asked: FetchCommit, ports: object) -> Fetched:
        at_work.set()
        await asyncio.Event().wait()
        return Fetched(asked)

    outcomes: list[Outcome] = []
    bench = bench_of(tmp_path, stand, outcomes)
    await bench.warn("r", 1)
    async with asyncio.timeout(60), bench.running():
        await at_work.wait()
    (held,) = bench.world.effects.values()
    assert (held.worker, held.attempts, outcomes) == (None, 0, [])
