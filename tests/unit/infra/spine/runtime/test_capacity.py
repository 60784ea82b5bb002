"""A process holds no more effects than it has room for, however it obtains them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.spine.memory.event_log import MemoryLog
from infra.spine.ports.effects import NewEffect
from infra.spine.ports.event_log import Commit
from infra.spine.runtime import claims, performer
from infra.spine.runtime.consumer import NOTHING, AnyConsumer, Decision, Meta
from infra.spine.runtime.places import without_place
from schemas.effects import Failed, FetchCommit, Lane
from schemas.events import RunWarned
from schemas.ids import ConsumerName, WorkerId, checkpoint_stream
from tests.kit.hosting import WORKER, Bench, Fetched, Script, consumer, effect

ASKED, CAPACITY = 40, 3


class Counting:
    """A consumer that requests many effects at once, and the largest number of them that were in
    progress together."""

    def __init__(self) -> None:
        self.performed: set[str] = set()
        self.now = self.most = 0
        self.go = asyncio.Event()
        self.consumer: AnyConsumer = replace(
            consumer(Script()), handle=self.handle, perform=self.perform
        )

    def handle(self, state: int, message: RunWarned | Fetched, meta: Meta) -> Decision:
        if isinstance(message, Fetched):
            return NOTHING
        return Decision(effects=tuple(effect(message.run, n) for n in range(ASKED)))

    async def perform(self, asked: FetchCommit, ports: object) -> Fetched:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        self.performed.add(asked.workspace)
        return Fetched(asked)


def waiting_effect(run: str) -> NewEffect:
    return NewEffect(effect(run, 1), ConsumerName("bench"), checkpoint_stream(run), uuid4())


@pytest.mark.parametrize("messages", [1, 5])
async def test_one_decision_is_born_claimed_as_far_as_there_is_room(
    tmp_path: Path, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    counting = Counting()
    bench = Bench(tmp_path, [counting.consumer], capacity=CAPACITY)
    runs = [f"r{n}" for n in range(messages)]
    for run in runs:
        await bench.warn(run, 1)
    async with bench.running():
        await bench.until(lambda: len(bench.world.effects) == messages * ASKED)
        await bench.until(lambda: counting.now >= CAPACITY)
        held = [one for one in bench.world.effects.values() if one.worker == WORKER]
        counting.go.set()
        await bench.until(lambda: len(counting.performed) == messages * ASKED)
    assert len(held) == counting.most == CAPACITY


async def test_the_second_of_two_workers_gets_its_share_of_a_thousand_effects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.02)
    monkeypatch.setattr(f"{__name__}.ASKED", 1000)
    taken = {WORKER: 0, WorkerId("second"): 0}
    counting = Counting()
    counting.go.set()

    def perform_as(worker: WorkerId) -> AnyConsumer:
        async def perform(asked: FetchCommit, ports: object) -> Fetched:
            taken[worker] += 1
            await asyncio.sleep(0)
            return await counting.perform(asked, ports)

        return replace(counting.consumer, perform=perform)

    first = Bench(tmp_path, [perform_as(WORKER)], capacity=8)
    second = replace(first, consumers=[perform_as(WorkerId("second"))], worker=WorkerId("second"))
    await first.warn("r", 1)
    async with first.running(), second.running():
        await first.until(lambda: len(counting.performed) == 1000)
    assert sum(taken.values()) == 1000
    assert min(taken.values()) >= 300, taken


async def test_an_effect_is_not_born_claimed_before_those_that_wait(tmp_path: Path) -> None:
    """One place, and effects of another run that wait for it: what the first run asks for next comes
    after them."""
    order: list[str] = []

    def handle(state: int, message: RunWarned | Fetched, meta: Meta) -> Decision:
        if isinstance(message, Fetched):
            order.append(message.effect.run_id)
            again = message.effect.run_id == "big" and order.count("big") < 3
            return Decision(effects=(effect("big", order.count("big")),)) if again else NOTHING
        return Decision(effects=(effect(message.run, 0),))

    bench = Bench(tmp_path, [replace(consumer(Script()), handle=handle)], capacity=1)
    await bench.warn("big", 1)
    await bench.warn("tiny", 1)
    async with bench.running():
        await bench.until(lambda: len(order) == 4)
    assert order == ["big", "tiny", "big", "big"]


async def test_an_effect_decided_during_a_claim_is_born_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that found nothing is followed by one that takes long. Until it is answered, effects that
    are decided here need no claim of their own."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    asked, answer = asyncio.Event(), asyncio.Event()
    claim, claims = bench.effects.claim, 0

    async def claim_slowly(*args: Any, **more: Any) -> Any:
        nonlocal claims
        claims += 1
        if claims == 2:
            asked.set()
            await answer.wait()
        return await claim(*args, **more)

    monkeypatch.setattr(bench.effects, "claim", claim_slowly, raising=False)
    async with bench.running():
        await asked.wait()
        await bench.warn("r", 1)
        await bench.until(lambda: script.performed == ["r"])
        assert claims == 2
        answer.set()


async def test_an_effect_that_is_claimed_too_late_for_its_place_is_performed_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the answer to a claim of two places is on its way, both go to effects that are born claimed.
    No poll wakes the worker afterwards."""
    order: list[str] = []

    async def perform(asked: FetchCommit, ports: object) -> Fetched:
        order.append(asked.run_id)
        await asyncio.sleep(0.2)
        return Fetched(asked)

    slow = replace(consumer(Script(asks=True)), perform=perform)
    bench = Bench(tmp_path, [slow], capacity=2)
    claim, claims = bench.effects.claim, 0
    late = NewEffect(effect("late", 1), slow.name, checkpoint_stream("late"), uuid4())

    async def claim_one_that_is_late(*args: Any, **more: Any) -> Any:
        nonlocal claims
        claims += 1
        if claims == 2:
            monkeypatch.setattr(performer, "SLOW_POLL_S", 3600.0)
            await MemoryLog(bench.world).commit(Commit(effects=(late,)))
        claimed = await claim(*args, **more)
        if claims == 2:
            await bench.warn("r", 1, 2)
            await bench.until(lambda: order == ["r", "r"])
        return claimed

    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.05)
    monkeypatch.setattr(bench.effects, "claim", claim_one_that_is_late, raising=False)
    async with bench.running():
        await bench.until(lambda: order == ["r", "r", "late"], within_s=10)


async def test_an_effect_due_just_after_a_claim_does_not_wait_for_the_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim leaves places free, and nobody tells the worker that there is more."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 3600.0)
    script = Script()
    bench = Bench(tmp_path, [consumer(script)])
    first, second = waiting_effect("first"), waiting_effect("second")
    await MemoryLog(bench.world).commit(Commit(effects=(first,)))
    claim, waiting = bench.effects.claim, [second]

    async def claim_before_the_second(*args: Any, **more: Any) -> Any:
        claimed = await claim(*args, **more)
        if waiting:
            await MemoryLog(bench.world).commit(Commit(effects=(waiting.pop(),)))
        return claimed

    monkeypatch.setattr(bench.effects, "claim", claim_before_the_second, raising=False)
    async with bench.running():
        await bench.until(lambda: script.performed == ["first", "second"], within_s=10)


async def test_a_run_at_its_limit_goes_on_as_soon_as_a_place_of_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No poll wakes the worker, which has places left all the time."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 3600.0)
    counting = Counting()
    counting.go.set()
    bench = Bench(tmp_path, [counting.consumer], run_capacity={Lane.CONTROL: 2})
    await bench.warn("r", 1)
    async with bench.running():
        await bench.until(lambda: len(counting.performed) == ASKED)
    assert 1 <= counting.most <= 2


async def test_a_run_of_which_little_is_held_gets_a_spare_place_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No effect of the large run ends."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 0.02)
    counting = Counting()
    bench = Bench(tmp_path, [counting.consumer], capacity=CAPACITY, spare={Lane.CONTROL: 2})

    def held() -> list[str]:
        rows = bench.world.effects.values()
        return sorted(row.new.effect.run_id for row in rows if row.worker == WORKER)

    await bench.warn("large", 1)
    async with bench.running():
        await bench.until(lambda: counting.now == CAPACITY)
        await bench.warn("small", 1)
        await bench.until(lambda: counting.now == CAPACITY + 2)
        assert held() == ["large"] * CAPACITY + ["small"] * 2
        await bench.warn("third", 1)
        await asyncio.sleep(0.1)
        assert counting.most == CAPACITY + 2, "the spare places are taken"
        counting.go.set()
        await bench.until(lambda: len(counting.performed) == 3 * ASKED)
    assert counting.most == CAPACITY + 2


async def test_twin_without_spare_places_a_small_run_waits_for_a_large_one(tmp_path: Path) -> None:
    counting = Counting()
    bench = Bench(tmp_path, [counting.consumer], capacity=CAPACITY)
    await bench.warn("large", 1)
    async with bench.running():
        await bench.until(lambda: counting.now == CAPACITY)
        await bench.warn("small", 1)
        await asyncio.sleep(0.2)
        assert counting.now == CAPACITY
        counting.go.set()
        await bench.until(lambda: len(counting.performed) == 2 * ASKED)


async def test_a_place_that_a_draft_does_not_need_after_all_is_claimed_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft reserves the only place. Before it misses, because another process has consumed its event,
    the worker looks for work and finds its place taken."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 3600.0)
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)], capacity=1)
    async with bench.running() as runtime:
        await asyncio.sleep(0.1)  # the first claims found nothing
        commit = bench.log.commit

        async def miss(draft: Commit) -> Any:
            monkeypatch.setattr(bench.log, "commit", commit)
            await MemoryLog(bench.world).commit(Commit(effects=(waiting_effect("other"),)))
            runtime._performer.wake()
            await asyncio.sleep(0.1)
            bench.world.inbox[draft.consumed[0]] = 1
            return await commit(draft)

        monkeypatch.setattr(bench.log, "commit", miss, raising=False)
        await bench.warn("r", 1)
        await bench.until(lambda: script.performed == ["other"], within_s=10)


def lose_claim(bench: Bench, run: str) -> None:
    """Another worker has taken the effect of a run over."""
    bench.world.workers[WorkerId("other")] = bench.world.now.replace(year=2100)
    for row in bench.world.effects.values():
        if row.new.effect.run_id == run:
            row.worker, row.epoch = WorkerId("other"), row.epoch + 1


def fail(outcome: Fetched | Failed) -> None:
    if outcome.effect.run_id == "first":
        raise ValueError("a bug")


@pytest.mark.parametrize("refused", ["fenced", "dead letter"])
async def test_the_place_of_an_outcome_that_is_refused_is_claimed_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(performer, "SLOW_POLL_S", 3600.0)
    order: list[str] = []

    async def perform(asked: FetchCommit, ports: object) -> Fetched:
        order.append(asked.run_id)
        await asyncio.sleep(2 * performer.AGAIN_S)  # the worker has found its place taken
        if asked.run_id == "first" and refused == "fenced":
            lose_claim(bench, "first")
        return Fetched(asked)

    script = Script(on_outcome=fail if refused == "dead letter" else lambda outcome: None)
    bench = Bench(tmp_path, [replace(consumer(script), perform=perform)], capacity=1)
    for run in ("first", "second"):
        await MemoryLog(bench.world).commit(Commit(effects=(waiting_effect(run),)))
    async with bench.running():
        await bench.until(lambda: order == ["first", "second"], within_s=10)
    assert len(bench.letters()) == (refused == "dead letter")


async def test_a_claim_whose_answer_was_lost_is_performed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database says that the effect of a commit was born claimed, and its worker does not know."""
    monkeypatch.setattr(performer, "SLOW_POLL_S", 3600.0)
    script = Script(asks=True)
    bench = Bench(tmp_path, [consumer(script)])
    async with bench.running():
        await asyncio.sleep(0.1)  # the first claims found nothing
        bench.log.after["commit"] = 1
        await bench.warn("r", 1)
        await bench.until(lambda: script.performed == ["r"], within_s=10)


@pytest.mark.parametrize("most", [claims.MOST_WAITING, 0])
async def test_an_effect_that_waits_for_another_service_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A few groups whose judge was slow kept all other runs from being graded. The twin lets no effect
    wait without a place."""
    monkeypatch.setattr(claims, "MOST_WAITING", most)
    order: list[str] = []
    answered, is_back = asyncio.Event(), asyncio.Event()

    async def perform(asked: FetchCommit, ports: object) -> Fetched:
        order.append(asked.run_id)
        if asked.run_id == "judged":
            with without_place():
                await answered.wait()
            is_back.set()
            await asyncio.sleep(3 * performer.AGAIN_S)
            order.append("scored")
        return Fetched(asked)

    bench = Bench(tmp_path, [replace(consumer(Script()), perform=perform)], capacity=1)
    for run in ("judged", "first"):
        await MemoryLog(bench.world).commit(Commit(effects=(waiting_effect(run),)))
    async with bench.running() as runtime:
        if most:
            await bench.until(lambda: order == ["judged", "first"], within_s=10)
        else:
            await asyncio.sleep(3 * performer.AGAIN_S)
            assert order == ["judged"]
        answered.set()
        await is_back.wait()
        await MemoryLog(bench.world).commit(Commit(effects=(waiting_effect("last"),)))
        runtime._performer.wake()
        await bench.until(lambda: "last" in order, within_s=10)
    assert order.index("scored") < order.index("last"), "its place is taken again"
