"""The contract of every Effects, together with the log in the same database."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Protocol
from uuid import uuid4

import pytest

from infra.spine.ports.effects import Claimed, Effects, NewEffect, StaleGeneration
from infra.spine.ports.event_log import Commit, CommitMiss, EventLog
from schemas.effects import FetchCommit, Lane
from schemas.events import (
    EvaluationCompleted,
    EvaluationRetryRequested,
    Event,
    MessageDeadLettered,
    MessageRedriven,
    RunPaused,
    RunRequested,
    RunResumed,
    RunStopped,
)
from schemas.events.decider_version import DECIDER_VERSION
from schemas.ids import ConsumerName, WorkerId, workspace_stream
from schemas.specs import CommitSpec
from tests.kit.commits import commit_of
from tests.kit.story import beginning

SYNC = ConsumerName("sync")
LEASE_S = 5.0
NEWER = DECIDER_VERSION + 1


class LeaseExpiry(Protocol):
    """Makes a lease and the pause of an effect expire, by moving a clock or by changing a row."""

    async def __call__(self, seconds: float, worker: WorkerId) -> None: ...


@dataclass
class Bound:
    """The adapters under test. `expire_lease` ends a worker's lease as the passing of time does."""

    log: EventLog
    effects: Effects
    expire_lease: LeaseExpiry


class LargeFetch(FetchCommit):
    """A fetch of another size."""

    places: ClassVar[int] = 8

    @property
    def size(self) -> int:
        return self.places


def requested(run: str, *, priority: int) -> RunRequested:
    found = next(beginning(run, run, steps=1))
    assert isinstance(found, RunRequested)
    advanced = found.config.advanced.model_copy(update={"priority": priority})
    config = found.config.model_copy(update={"advanced": advanced})
    return found.model_copy(update={"config": config})


def effect(run: str, *, claimed: bool = False, size: int = 1) -> NewEffect:
    kind = FetchCommit if size == 1 else LargeFetch
    asked = kind(
        workspace=uuid4().hex,
        request=uuid4(),
        commit=CommitSpec(url="/nowhere"),
        entrypoints=(),
        requester=f"run-{run}",
    )
    stream = workspace_stream(asked.workspace)
    return NewEffect(
        effect=asked, consumer=SYNC, stream=stream, correlation=uuid4(), claimed=claimed
    )


async def worker(bound: Bound) -> WorkerId:
    name = WorkerId(uuid4().hex)
    await bound.effects.register(name, host="h", pid=1, lease_s=LEASE_S)
    return name


async def gate(bound: Bound, event: Event, version: int) -> None:
    await bound.log.commit(commit_of(event, version))


async def append(bound: Bound, event: Event) -> None:
    """Append at the stream's current version, whatever it is."""
    versions = await bound.log.versions([event.stream])
    await gate(bound, event, versions[event.stream] + 1)


def letter(run: str, *, pauses: bool = True) -> MessageDeadLettered:
    return MessageDeadLettered(
        consumer="sync",
        message_id=uuid4(),
        message_type="rl.run.warned",
        about=run,
        cause="a bug",
        payload="{}",
        pauses=pauses,
    )


def redrive_of(dead: MessageDeadLettered) -> MessageRedriven:
    return MessageRedriven(
        consumer=dead.consumer,
        letter=uuid4(),
        message_id=dead.message_id,
        message_stream=dead.message_stream,
        message_version=dead.message_version,
        about=dead.about,
        paused=dead.pauses,
    )


async def claim(
    bound: Bound,
    who: WorkerId,
    *,
    lane: Lane = Lane.CONTROL,
    limit: int = 1000,
    generation: int = 0,
) -> list[Claimed]:
    found = await bound.effects.claim(
        who, room={lane: limit}, consumers=[SYNC], generation=generation
    )
    return list(found)


class EffectsSuite:
    """The contract."""

    async def test_an_effect_is_claimed_once_in_order(self, bound: Bound) -> None:
        one, two = await worker(bound), await worker(bound)
        asked = [effect(uuid4().hex) for _ in range(3)]
        await bound.log.commit(Commit(effects=tuple(asked)))
        first = await claim(bound, one, limit=2)
        assert [c.id for c in first] == [a.effect.id for a in asked[:2]]
        assert [c.id for c in await claim(bound, two)] == [asked[2].effect.id]
        assert first[0].effect == asked[0].effect
        assert await claim(bound, two) == []

    async def test_other_lanes_and_consumers_are_not_for_us(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        assert await claim(bound, who, lane=Lane.TRAIN) == []
        stranger = ConsumerName("grade")
        found = await bound.effects.claim(who, room={Lane.CONTROL: 10}, consumers=[stranger])
        assert list(found) == []
        assert len(await claim(bound, who)) == 1

    async def test_born_claimed_is_held_from_the_start(self, bound: Bound) -> None:
        who, other = await worker(bound), await worker(bound)
        asked = effect(uuid4().hex, claimed=True)
        await bound.log.commit(Commit(worker=who, effects=(asked,)))
        assert await claim(bound, other) == []
        await bound.log.commit(Commit(worker=who, finished=((asked.effect.id, 1),)))
        assert (await bound.effects.holding(who)).claims == {}

    async def test_asking_twice_is_asking_once(self, bound: Bound) -> None:
        who, asked = await worker(bound), effect(uuid4().hex)
        await bound.log.commit(Commit(effects=(asked,)))
        await bound.log.commit(Commit(effects=(asked,)))
        assert len(await claim(bound, who)) == 1

    async def test_a_dead_workers_claim_is_taken_over_and_its_outcome_fenced(
        self, bound: Bound
    ) -> None:
        dead, heir = await worker(bound), await worker(bound)
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        (held,) = await claim(bound, dead)
        assert await claim(bound, heir) == []
        await bound.expire_lease(LEASE_S, dead)
        (taken,) = await claim(bound, heir)
        assert (taken.id, taken.epoch, taken.crashes) == (held.id, held.epoch + 1, 1)
        with pytest.raises(CommitMiss, match="fenced"):
            await bound.log.commit(Commit(worker=dead, finished=((held.id, held.epoch),)))
        await bound.log.commit(Commit(worker=heir, finished=((taken.id, taken.epoch),)))

    async def test_the_time_of_lost_attempts_is_kept_until_the_effect_ends(
        self, bound: Bound
    ) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        (first,) = await claim(bound, who)
        await bound.effects.retry(first, delay_s=0, error="away", wasted_s=1.5)
        (second,) = await claim(bound, who)
        await bound.effects.retry(first, delay_s=0, error="late", wasted_s=99)
        await bound.effects.release(second, wasted_s=0.25)
        (third,) = await claim(bound, who)
        assert (first.wasted_s, second.wasted_s, third.wasted_s) == (0, 1.5, 1.75)
        await bound.expire_lease(LEASE_S, who)
        (taken,) = await claim(bound, await worker(bound))
        assert 1.75 <= taken.wasted_s <= 1.75 + LEASE_S

    async def test_a_worker_does_not_claim_again_the_effects_it_holds(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        (held,) = await claim(bound, who)
        await bound.expire_lease(LEASE_S, who)
        assert await claim(bound, who) == []
        await bound.effects.register(who, host="h", pid=1, lease_s=LEASE_S)
        assert await claim(bound, who) == []
        await bound.log.commit(Commit(worker=who, finished=((held.id, held.epoch),)))

    async def test_without_a_live_lease_nothing_is_claimed(self, bound: Bound) -> None:
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        assert await claim(bound, WorkerId(uuid4().hex)) == []
        who = await worker(bound)
        await bound.expire_lease(LEASE_S, who)
        assert await claim(bound, who) == []
        await bound.effects.register(who, host="h", pid=1, lease_s=LEASE_S)
        assert len(await claim(bound, who)) == 1

    async def test_a_lease_that_ran_out_cannot_be_renewed(self, bound: Bound) -> None:
        who = await worker(bound)
        assert await bound.effects.renew(who, lease_s=LEASE_S)
        await bound.expire_lease(LEASE_S, who)
        assert not await bound.effects.renew(who, lease_s=LEASE_S)

    async def test_crashes_are_counted_apart_from_attempts_and_have_a_limit(
        self, bound: Bound
    ) -> None:
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        for crashes in range(22):
            who = await worker(bound)
            (held,) = await claim(bound, who)
            assert (held.crashes, held.attempts) == (crashes, 0)
            assert held.spent == (crashes > 20)
            await bound.effects.expire(who)

    async def test_a_death_counts_one_crash_however_many_effects_were_held(
        self, bound: Bound
    ) -> None:
        """A thousand effects, none of which is the cause, and 25 workers that die with them."""
        asked = [effect(uuid4().hex) for _ in range(1000)]
        await bound.log.commit(Commit(effects=tuple(asked)))
        for _ in range(25):
            who = await worker(bound)
            assert await claim(bound, who)
            await bound.effects.expire(who)
        who, done = await worker(bound), list[Claimed]()
        while held := await claim(bound, who):
            finished = tuple((one.id, one.epoch) for one in held)
            await bound.log.commit(Commit(worker=who, finished=finished))
            done += held
        assert {one.id for one in done} == {one.effect.id for one in asked}
        assert sum(one.crashes for one in done) == 25
        assert not [one.id for one in done if one.spent]

    async def test_an_effect_that_ends_its_workers_ends_as_a_crash_and_no_other_does(
        self, bound: Bound
    ) -> None:
        """64 effects are held at once, and new ones are requested all the time. Nothing else ends before
        the poison ends the worker."""
        poison, deaths = effect("poison"), 0
        await bound.log.commit(Commit(effects=(*(effect("r") for _ in range(40)), poison)))
        while True:
            await bound.log.commit(Commit(effects=tuple(effect("r") for _ in range(10))))
            who = await worker(bound)
            held = await claim(bound, who, limit=64)
            spent = [one.id for one in held if one.spent]
            if spent:
                break
            if poison.effect.id in {one.id for one in held}:
                deaths += 1
                assert deaths < 40
                await bound.effects.expire(who)
                continue
            finished = tuple((one.id, one.epoch) for one in held)
            await bound.log.commit(Commit(worker=who, finished=finished))
        assert spent == [poison.effect.id]

    async def test_effects_that_outlived_two_deaths_are_claimed_half_as_many_at_once(
        self, bound: Bound
    ) -> None:
        await bound.log.commit(Commit(effects=tuple(effect("r") for _ in range(8))))
        for _ in range(3):
            who = await worker(bound)
            together = len(await claim(bound, who, limit=8))
            await bound.effects.expire(who)
        assert together == 4

    async def test_retry_waits_and_counts_and_release_does_not(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        (held,) = await claim(bound, who)
        await bound.effects.release(held)
        (held,) = await claim(bound, who)
        assert (held.attempts, held.crashes) == (0, 0)
        await bound.effects.retry(held, delay_s=0, error="a full disk", counted=False)
        (held,) = await claim(bound, who)
        assert held.attempts == 0
        await bound.effects.retry(held, delay_s=0, error="not now")
        (held,) = await claim(bound, who)
        assert held.attempts == 1
        await bound.effects.retry(held, delay_s=60, error="not today")
        assert await claim(bound, who) == []
        wait = await bound.effects.next_due_s(who, lanes=[Lane.CONTROL], consumers=[SYNC])
        assert wait is not None
        assert 50 < wait <= 60
        stranger = ConsumerName("grade")
        for lane, name in ((Lane.TRAIN, SYNC), (Lane.CONTROL, stranger)):
            assert await bound.effects.next_due_s(who, lanes=[lane], consumers=[name]) is None

    async def test_an_idle_worker_knows_when_the_lease_of_a_holder_expires(
        self, bound: Bound
    ) -> None:
        holder, idle, heir = await worker(bound), await worker(bound), await worker(bound)

        async def wait(who: WorkerId) -> float | None:
            return await bound.effects.next_due_s(who, lanes=[Lane.CONTROL], consumers=[SYNC])

        assert await wait(heir) is None, f"nobody holds anything, not even {idle}"
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        (held,) = await claim(bound, holder)
        found = await wait(heir)
        assert found is not None
        assert 0 < found <= LEASE_S
        assert await wait(holder) is None, "one's own lease gives one nothing"
        await bound.expire_lease(found, holder)
        assert await wait(heir) is None
        assert [c.id for c in await claim(bound, heir)] == [held.id]

    async def test_paused_runs_are_not_claimed_but_their_outcomes_count(self, bound: Bound) -> None:
        who, run = await worker(bound), uuid4().hex
        held, waiting = effect(run, claimed=True), effect(run)
        await bound.log.commit(Commit(worker=who, effects=(held, waiting)))
        await gate(bound, RunPaused(run=run, step=1), 1)
        assert await claim(bound, who) == []
        assert await bound.effects.gates([run, "other"]) == {run: "paused"}
        await bound.log.commit(Commit(worker=who, finished=((held.effect.id, 1),)))
        await gate(bound, RunResumed(run=run, step=1), 2)
        assert len(await claim(bound, who)) == 1

    async def test_a_closed_run_discards_its_work_for_good(self, bound: Bound) -> None:
        who, run = await worker(bound), uuid4().hex
        held = effect(run, claimed=True)
        await bound.log.commit(Commit(worker=who, effects=(held, effect(run))))
        await gate(bound, RunStopped(run=run, step=1), 1)
        with pytest.raises(CommitMiss, match="fenced"):
            await bound.log.commit(Commit(worker=who, finished=((held.effect.id, 1),)))
        await gate(bound, RunResumed(run=run, step=1), 2)
        assert await bound.effects.gates([run]) == {run: "closed"}
        assert await claim(bound, who) == []

    async def test_a_retried_evaluation_is_open_again(self, bound: Bound) -> None:
        who, run = await worker(bound), uuid4().hex
        await gate(bound, EvaluationCompleted(evaluation=run, status="failed"), 1)
        await bound.log.commit(Commit(worker=who, effects=(effect(run),)))
        assert await claim(bound, who) == []
        await gate(bound, EvaluationRetryRequested(evaluation=run, number=1), 2)
        assert await bound.effects.gates([run]) == {run: "open"}
        await bound.log.commit(Commit(worker=who, effects=(effect(run),)))
        assert len(await claim(bound, who)) == 1
        await gate(bound, EvaluationCompleted(evaluation=run, status="finished"), 3)
        assert await bound.effects.gates([run]) == {run: "closed"}

    async def test_effects_of_a_closed_run_are_not_kept(self, bound: Bound) -> None:
        who, run = await worker(bound), uuid4().hex
        await gate(bound, RunStopped(run=run, step=1), 1)
        born = effect(run, claimed=True)
        await bound.log.commit(Commit(worker=who, effects=(born, effect(run), effect("other"))))
        with pytest.raises(CommitMiss, match="fenced"):
            await bound.log.commit(Commit(worker=who, finished=((born.effect.id, 1),)))
        assert len(await claim(bound, who)) == 1

    async def test_a_held_run_waits_for_every_letter_whatever_its_own_gate(
        self, bound: Bound
    ) -> None:
        who, run = await worker(bound), uuid4().hex
        await bound.log.commit(Commit(effects=(effect(run),)))
        letters = [letter(run), letter(run)]
        for held in letters:
            await append(bound, held)
        assert await claim(bound, who) == []
        assert await bound.effects.gates([run]) == {run: "paused"}
        await append(bound, RunPaused(run=run, step=1))
        await append(bound, RunResumed(run=run, step=1))
        await append(bound, redrive_of(letters[0]))
        assert await claim(bound, who) == []
        await append(bound, RunPaused(run=run, step=1))
        await append(bound, redrive_of(letters[1]))
        assert await claim(bound, who) == []
        await append(bound, RunResumed(run=run, step=1))
        assert await bound.effects.gates([run]) == {run: "open"}
        assert len(await claim(bound, who)) == 1

    async def test_a_letter_that_pauses_nothing_holds_nothing(self, bound: Bound) -> None:
        who, run = await worker(bound), uuid4().hex
        await bound.log.commit(Commit(effects=(effect(run),)))
        quiet = letter(run, pauses=False)
        await append(bound, quiet)
        await append(bound, redrive_of(quiet))
        assert len(await claim(bound, who)) == 1

    async def test_effects_that_a_worker_does_not_know_are_released_and_not_counted(
        self, bound: Bound
    ) -> None:
        one, two = await worker(bound), await worker(bound)
        await bound.log.commit(Commit(effects=tuple(effect(uuid4().hex) for _ in range(3))))
        first, second = await claim(bound, one, limit=2)
        (others,) = await claim(bound, two)
        assert await bound.effects.disown(one, generation=0, keep=[first.id]) == 1
        (found,) = await claim(bound, one, generation=1)
        assert (found.id, found.attempts, found.crashes) == (second.id, 0, 0)
        with pytest.raises(CommitMiss, match="fenced"):
            await bound.log.commit(Commit(worker=one, finished=((second.id, second.epoch),)))
        done = ((first.id, first.epoch), (found.id, found.epoch))
        await bound.log.commit(Commit(worker=one, finished=done))
        await bound.log.commit(Commit(worker=two, finished=((others.id, others.epoch),)))

    async def test_a_claim_that_comes_after_its_generation_takes_nothing(
        self, bound: Bound
    ) -> None:
        who, other = await worker(bound), await worker(bound)
        assert await bound.effects.disown(who, generation=0, keep=[]) == 1
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        with pytest.raises(StaleGeneration):
            await claim(bound, who, generation=0)
        (found,) = await claim(bound, who, generation=1)
        held = await bound.effects.holding(who)
        assert (held.generation, held.claims) == (1, {found.id: found.epoch})
        assert (await bound.effects.holding(other)).claims == {}

    async def test_a_disowning_that_comes_late_gives_nothing_back(self, bound: Bound) -> None:
        who = await worker(bound)
        assert await bound.effects.disown(who, generation=0, keep=[]) == 1
        await bound.log.commit(Commit(effects=(effect(uuid4().hex),)))
        (found,) = await claim(bound, who, generation=1)
        assert await bound.effects.disown(who, generation=0, keep=[]) is None
        assert (await bound.effects.holding(who)).claims == {found.id: found.epoch}

    async def test_a_worker_that_nobody_knows_of_disowns_nothing(self, bound: Bound) -> None:
        stranger = WorkerId(uuid4().hex)
        assert await bound.effects.disown(stranger, generation=0, keep=[]) is None
        assert (await bound.effects.holding(stranger)).claims == {}

    async def test_effects_of_paused_or_stopped_runs_do_not_count_as_unfinished(
        self, bound: Bound
    ) -> None:
        async def is_left(*, lane: Lane = Lane.CONTROL, name: ConsumerName = SYNC) -> bool:
            return await bound.effects.has_unfinished(lanes=[lane], consumers=[name])

        who, runs = await worker(bound), [uuid4().hex for _ in range(4)]
        assert not await is_left()
        held_back = [effect(run, claimed=True) for run in runs[:3]]
        asked = (*(effect(run) for run in runs[:3]), *held_back)
        await bound.log.commit(Commit(worker=who, effects=asked))
        assert await is_left()
        assert not await is_left(lane=Lane.TRAIN)
        assert not await is_left(name=ConsumerName("grade"))
        await gate(bound, RunPaused(run=runs[0], step=1), 1)
        await append(bound, letter(runs[1]))
        assert await is_left()
        await gate(bound, RunStopped(run=runs[2], step=1), 1)
        assert not await is_left()
        await bound.log.commit(Commit(effects=(effect(runs[3]),)))
        assert await is_left()
        (held,) = await claim(bound, who)
        assert await is_left(), "a claim may come back"
        await bound.effects.retry(held, delay_s=60, error="not\0now \ud800")
        assert await is_left(), "what is tried again later is not done"

    @pytest.mark.parametrize("most", [None, 5])
    async def test_a_run_of_a_newer_release_is_left_to_its_workers(
        self, bound: Bound, monkeypatch: pytest.MonkeyPatch, most: int | None
    ) -> None:
        ours, newer = uuid4().hex, uuid4().hex
        for run, decider in ((newer, NEWER), (ours, DECIDER_VERSION)):
            await gate(bound, requested(run, priority=2).model_copy(update={"decider": decider}), 1)
            await bound.log.commit(Commit(effects=(effect(run), effect(run))))
        limits = {Lane.CONTROL: most} if most else None

        async def claimed_runs() -> list[str]:
            found = await bound.effects.claim(
                await worker(bound), room={Lane.CONTROL: 9}, consumers=[SYNC], most=limits
            )
            return [claimed.effect.run_id for claimed in found]

        assert await bound.effects.runs_of_newer([ours, newer]) == {newer}
        assert await claimed_runs() == [ours, ours]
        await bound.log.commit(Commit(effects=(effect(newer),)))
        monkeypatch.setattr(bound.effects, "_decider", NEWER)
        assert await bound.effects.runs_of_newer([ours, newer]) == frozenset()
        assert await claimed_runs() == [newer] * 3

    async def test_effects_of_a_newer_release_do_not_count_as_unfinished(
        self, bound: Bound
    ) -> None:
        run = uuid4().hex
        await gate(bound, requested(run, priority=1).model_copy(update={"decider": NEWER}), 1)
        await bound.log.commit(Commit(effects=(effect(run),)))
        assert not await bound.effects.has_unfinished(lanes=[Lane.CONTROL], consumers=[SYNC])

    async def test_a_tiny_run_is_claimed_between_the_effects_of_a_large_one(
        self, bound: Bound
    ) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=tuple(effect("big") for _ in range(100))))
        await claim(bound, who, limit=10)
        await bound.log.commit(Commit(effects=tuple(effect("tiny") for _ in range(3))))
        order = [one.effect.run_id for one in await claim(bound, who, limit=8)]
        assert order[:6].count("tiny") == 3, order

    async def test_a_run_gets_the_share_of_its_weight(self, bound: Bound) -> None:
        who = await worker(bound)
        heavy = requested("heavy", priority=100)
        await bound.log.commit(commit_of(heavy, 1))
        await bound.log.commit(Commit(effects=tuple(effect("light") for _ in range(300))))
        await bound.log.commit(Commit(effects=tuple(effect("heavy") for _ in range(300))))
        order = [one.effect.run_id for one in await claim(bound, who, limit=202)]
        assert 1 <= order.count("light") <= 3, order.count("light")

    async def test_an_effect_that_is_tried_again_keeps_its_turn(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=tuple(effect("r") for _ in range(20))))
        first, *_ = await claim(bound, who, limit=5)
        await bound.effects.retry(first, delay_s=0, error="not now")
        assert [one.id for one in await claim(bound, who, limit=1)] == [first.id]

    async def test_a_run_that_slept_does_not_catch_up(self, bound: Bound) -> None:
        """Neither after its lane was busy with another run, nor when it is resumed."""
        who = await worker(bound)
        await bound.log.commit(Commit(effects=tuple(effect("sleeper") for _ in range(40))))
        await gate(bound, RunPaused(run="sleeper", step=1), 1)
        await bound.log.commit(Commit(effects=tuple(effect("awake") for _ in range(200))))
        for one in (await claim(bound, who, limit=100))[:-1]:
            await bound.log.commit(Commit(worker=who, finished=((one.id, one.epoch),)))
        await gate(bound, RunResumed(run="sleeper", step=1), 2)
        await bound.log.commit(Commit(effects=tuple(effect("late") for _ in range(40))))
        order = [one.effect.run_id for one in await claim(bound, who, limit=30)]
        assert {run: order.count(run) for run in ("sleeper", "awake", "late")} == {
            "sleeper": 10,
            "awake": 10,
            "late": 10,
        }

    async def test_a_run_takes_no_more_places_than_its_limit(self, bound: Bound) -> None:
        """In all workers together, while other runs get the rest."""
        one, two = await worker(bound), await worker(bound)
        most = {Lane.CONTROL: 5}

        async def claim_limited(who: WorkerId, room: int) -> list[Claimed]:
            found = await bound.effects.claim(
                who, room={Lane.CONTROL: room}, consumers=[SYNC], most=most
            )
            return list(found)

        await bound.log.commit(Commit(effects=tuple(effect("big") for _ in range(50))))
        first = await claim_limited(one, 3)
        assert [each.effect.run_id for each in first] == ["big"] * 3
        await bound.log.commit(Commit(effects=tuple(effect("tiny") for _ in range(3))))
        second = await claim_limited(two, 20)
        assert Counter(each.effect.run_id for each in second) == {"big": 2, "tiny": 3}
        assert await claim_limited(one, 20) == []
        await bound.log.commit(Commit(worker=one, finished=((first[0].id, first[0].epoch),)))
        (third,) = await claim_limited(two, 20)
        assert third.effect.run_id == "big"
        assert len(await claim(bound, one, limit=10)) == 10, "without the limit"

    async def test_spare_places_are_for_runs_that_hold_few(self, bound: Bound) -> None:
        who = await worker(bound)

        async def claim_beyond(room: int, spare: int, *, most: int = 0) -> list[str]:
            found = await bound.effects.claim(
                who,
                room={Lane.CONTROL: room},
                consumers=[SYNC],
                most={Lane.CONTROL: most} if most else None,
                spare={Lane.CONTROL: spare},
            )
            assert all(each.epoch == 1 for each in found)
            return [each.effect.run_id for each in found]

        await bound.log.commit(Commit(effects=tuple(effect("big") for _ in range(20))))
        assert await claim_beyond(4, 3) == ["big"] * 4, "none beyond its room"
        await bound.log.commit(Commit(effects=tuple(effect("tiny") for _ in range(4))))
        assert await claim_beyond(0, 0) == []
        assert await claim_beyond(0, 3, most=9) == [], "a lane with a limit has no spare"
        assert await claim_beyond(-1, 3) == ["tiny"] * 2, "one of three is taken"
        assert await claim_beyond(-3, 3) == []
        await gate(bound, RunPaused(run="tiny", step=1), 1)
        assert await claim_beyond(-2, 3) == [], "it is paused"
        await gate(bound, RunResumed(run="tiny", step=1), 2)
        assert await claim_beyond(-2, 3) == ["tiny"]
        assert await claim_beyond(-1, 3) == [], "it holds three now"
        assert await claim_beyond(1, 3) in (["big"], ["tiny"])

    async def test_an_effect_that_is_larger_than_what_is_left_gets_no_spare_place(
        self, bound: Bound
    ) -> None:
        one, two = await worker(bound), await worker(bound)

        async def claim_groups(who: WorkerId, room: int, spare: int) -> list[str]:
            found = await bound.effects.claim(
                who, room={Lane.CONTROL: room}, consumers=[SYNC], spare={Lane.CONTROL: spare}
            )
            return [each.effect.run_id for each in found]

        for run in ("a", "b", "c"):
            await bound.log.commit(Commit(effects=(effect(run, size=8),)))
        assert await claim_groups(one, 0, 7) == []
        assert await claim_groups(one, -1, 8) == [], "seven places are left"
        assert await claim_groups(one, 1, 8) == ["a"], "it takes seven of the spare places"
        assert await claim_groups(one, -7, 8) == []
        assert await claim_groups(two, 8, 8) == ["b", "c"]

    async def test_a_worker_without_a_lease_gets_no_spare_place(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=(effect("tiny"),)))
        await bound.effects.expire(who)
        found = await bound.effects.claim(
            who, room={Lane.CONTROL: 0}, consumers=[SYNC], spare={Lane.CONTROL: 2}
        )
        assert list(found) == []

    async def test_a_paused_run_is_not_claimed_within_its_limit(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=(effect("r"), effect("s"))))
        await gate(bound, RunPaused(run="r", step=1), 1)
        found = await bound.effects.claim(
            who, room={Lane.CONTROL: 9}, consumers=[SYNC], most={Lane.CONTROL: 5}
        )
        assert [each.effect.run_id for each in found] == ["s"]

    async def test_an_effect_takes_the_places_of_its_size(self, bound: Bound) -> None:
        who = await worker(bound)
        await bound.log.commit(Commit(effects=tuple(effect("r", size=8) for _ in range(10))))
        assert len(await claim(bound, who, limit=20)) == 3, "the third takes the last place"
