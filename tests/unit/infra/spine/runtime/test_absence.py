"""The database goes away and comes back under a runtime: nothing is lost, nothing is done twice,
and no claim is forgotten, whether a response was lost before or after the write."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.spine.memory.event_log import MemoryEffects
from infra.spine.ports.effects import Holding
from infra.spine.postgres import errors
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.runtime import attempt, performer
from schemas.errors import JudgeAway, RepositoryAway, SamplerBusy, StoreAway
from schemas.ids import WorkerId
from tests.kit.hosting import Bench, Script, consumer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here notifies the runtime of a change, so it polls often."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    monkeypatch.setattr(errors, "PAUSE_S", 0.05)
    monkeypatch.setattr(attempt, "STORE_PAUSE_S", 0.0)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_decision_is_written_once(tmp_path: Path, when: str) -> None:
    bench = Bench(tmp_path, [consumer(Script())])
    getattr(bench.log, when)["commit"] = 3
    await bench.warn("r", 1, 2)
    async with bench.running():
        await bench.until(lambda: len(bench.seen("r")) == 2)
    assert bench.seen("r") == [1, 2]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_effect_claimed_in_an_unanswered_commit_is_performed(
    tmp_path: Path, when: str
) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    getattr(bench.log, when)["commit"] = 1
    async with bench.running() as started:
        await bench.until(lambda: not started._claims.may_claim)
        await bench.warn("r", 1)
        await bench.until(lambda: len(bench.seen("r")) == 1)
    assert script.performed == ["r"]


async def test_twin_without_giving_back_what_we_do_not_know_of_it_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep_all(*_: object, **__: Any) -> None:
        """The protection, switched off."""

    monkeypatch.setattr(MemoryEffects, "disown", keep_all)
    bench = Bench(tmp_path, [consumer(Script(asks=True))])
    bench.log.after["commit"] = 1
    async with bench.running() as started:
        await bench.until(lambda: not started._claims.may_claim)
        await bench.warn("r", 1)
        with pytest.raises(TimeoutError):
            await bench.until(lambda: len(bench.seen("r")) == 1, within_s=2)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_claims_without_an_answer_are_claimed_again(tmp_path: Path, when: str) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("r", 1)
    async with bench.running() as started:
        started._committer._drafter._reserve = lambda effect: False
        getattr(bench.effects, when)["claim"] = 2
        await bench.until(lambda: len(bench.seen("r")) == 1)
    assert bench.world.effects == {}


@pytest.mark.parametrize(
    "error",
    [
        DatabaseUnavailable("gone"),
        StoreAway("the disk is full"),
        JudgeAway("it answered 429"),
        SamplerBusy("another worker replaces the weights"),
        RepositoryAway("asked again", pause_s=0.0),
    ],
)
async def test_an_attempt_that_met_no_database_or_no_store_is_not_counted(
    tmp_path: Path, error: Exception
) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    times, attempts = 0, -1

    async def perform(effect: Any, ports: object) -> Any:
        nonlocal times, attempts
        times += 1
        [row] = bench.world.effects.values()
        attempts = row.attempts
        if times < 9:
            raise error
        assert original is not None
        return await original(effect, ports)

    original = bench.consumers[0].perform
    object.__setattr__(bench.consumers[0], "perform", perform)
    await bench.warn("r", 1)
    async with bench.running():
        await bench.until(lambda: len(bench.seen("r")) == 1, within_s=20)
    assert times == 9
    assert attempts == 0, "those of other errors are all left"


async def test_an_outcome_waits_for_the_database(tmp_path: Path) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("r", 1)
    async with bench.running():
        await bench.until(lambda: script.performed != [] or bool(bench.world.effects))
        bench.log.before["commit"] = 5
        await bench.until(lambda: len(bench.seen("r")) == 1)
    assert script.performed == ["r"], "what was finished is not done again"


async def test_a_database_that_flickers_everywhere_changes_nothing(tmp_path: Path) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    await bench.warn("r", *range(1, 21))
    calls = ("load", "commit", "consumed", "versions", "claim", "release", "retry", "next_due_s")
    async with bench.running():
        for _ in range(5):
            for name in calls:
                for port in (bench.log, bench.effects):
                    port.before[name] = 1
                    port.after[name] = 1
            seen = len(bench.seen("r"))
            await bench.warn("r", 100 + seen)
            await bench.until(partial(_has_seen_more, bench, seen), within_s=30)
        await bench.until(lambda: len(bench.seen("r")) == 25, within_s=30)
    assert bench.world.effects == {}


def _has_seen_more(bench: Bench, count: int) -> bool:
    return len(bench.seen("r")) > count


async def test_a_check_of_the_claims_keeps_an_outcome_that_waits_for_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    perform, holding = bench.consumers[0].perform, MemoryEffects.holding
    started, finish, asked, answer = (asyncio.Event() for _ in range(4))

    async def perform_slowly(effect: Any, ports: Any) -> Any:
        started.set()
        await finish.wait()
        assert perform is not None
        return await perform(effect, ports)

    async def answer_slowly(effects: MemoryEffects, worker: WorkerId) -> Holding:
        found = await holding(effects, worker)
        asked.set()
        await answer.wait()
        return found

    # given: a worker performs an effect, and compares its claims with the database
    object.__setattr__(bench.consumers[0], "perform", perform_slowly)
    await bench.warn("r", 1)
    async with bench.running() as runtime:
        await started.wait()
        monkeypatch.setattr(MemoryEffects, "holding", answer_slowly)
        runtime._claims.distrust()
        await asked.wait()
        # when: the effect is finished before the database answers
        finish.set()
        await bench.until(lambda: bool(runtime._claims._in_commit))
        answer.set()
        await bench.until(lambda: len(bench.seen("r")) == 1)
    # then: its claim is kept
    assert script.performed == ["r"], "the claim was released although its outcome was there"
