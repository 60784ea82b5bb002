"""The learn consumer takes one step per batch, from the newest version, and collects nothing that
is still needed."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from pydantic import TypeAdapter

from consumers.learn.consumer import CONSUMER, SMALL_STATE_BYTES, evolve
from consumers.learn.retention import RECOVERY_KEPT
from consumers.learn.state import PolicyState
from schemas.effects import Failed, InitializePolicy, PolicyBuilt, TrainStep
from schemas.errors import FailureCategory
from schemas.events import (
    BatchAssembled,
    PolicyFailed,
    PolicyInitialized,
    PolicyUpdated,
    RunStarted,
)
from schemas.ids import StreamName
from schemas.specs import BatchGroup, Plan, TrainSpec
from tests.kit.decider import Given, given
from tests.kit.specs import ref, train_spec, version
from trainer.schedule import Pace

STREAM = StreamName("policy-r1")
SPEC = train_spec()
SFT = train_spec(advanced={"algorithm": "sft"})
BATCH = UUID(int=9)
GROUPS = (BatchGroup(slot=0, replacement=0, artifact=ref("group"), rewards=(1.0, 0.0)),)


def started(spec: TrainSpec = SPEC) -> RunStarted:
    plan = Plan(total_steps=9, batch_size=1, num_samples=2, num_rows=8)
    return RunStarted(run="r1", plan=plan, spec=spec)


def initialized(spec: TrainSpec = SPEC, *, size: int | None = None) -> PolicyInitialized:
    return PolicyInitialized(
        run="r1", spec=spec, state=version(0, size=size), versions={"torch": "2"}
    )


def assembled(step: int, *, durable: bool = False) -> BatchAssembled:
    return BatchAssembled(run="r1", step=step, groups=GROUPS, durable=durable)


def updated(step: int, *, durable: bool = True, pinned: bool = False) -> PolicyUpdated:
    return PolicyUpdated(
        run="r1",
        step=step,
        state=version(step, durable=durable),
        batch=BATCH,
        metrics={"train/loss": 0.5},
        plan=(12,),
        versions={"torch": "2"},
        pinned=pinned,
    )


def train(step: int, **changes: Any) -> TrainStep:
    values = {
        "spec": SPEC,
        "step": step,
        "batch": BATCH,
        "base": version(step - 1),
        "taken": step - 1,
        "groups": GROUPS,
    }
    return TrainStep.model_validate(values | changes)


def built(effect: InitializePolicy | TrainStep, step: int) -> PolicyBuilt:
    return PolicyBuilt(
        effect,
        state=version(step),
        metrics={"train/loss": 0.5},
        plan=(12,),
        versions={"torch": "2"},
    )


def steps(world: Given, step: int, *, durable: bool = False) -> Sequence[TrainStep]:
    effects = world.when(assembled(step, durable=durable), event_id=BATCH).effects
    return [effect for effect in effects if isinstance(effect, TrainStep)]


def test_a_started_run_needs_version_0() -> None:
    given(CONSUMER).when(started()).then(effects=[InitializePolicy(spec=SPEC)])
    given(CONSUMER, initialized()).when(started()).then_nothing()


def test_version_0_is_recorded_once() -> None:
    outcome = built(InitializePolicy(spec=SPEC), 0)
    measured = initialized().model_copy(update={"metrics": {"train/loss": 0.5}})
    given(CONSUMER).when(outcome, stream=STREAM).then(events=[measured])
    given(CONSUMER, initialized(), updated(1)).when(outcome, stream=STREAM).then_nothing()


def test_a_batch_is_one_step_from_the_newest_version() -> None:
    world = given(CONSUMER, initialized(), updated(1))
    world.when(assembled(2), event_id=BATCH).then(effects=[train(2)])


def test_the_batch_of_a_known_step_decides_nothing() -> None:
    world = given(CONSUMER, initialized(), updated(1), updated(2))
    world.when(assembled(1)).then_nothing()
    world.when(assembled(2)).then_nothing()


def test_a_batch_before_version_0_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="before version 0"):
        given(CONSUMER).when(assembled(1))


def test_a_taken_step_is_recorded_once() -> None:
    world = given(CONSUMER, initialized())
    world.when(built(train(1), 1), stream=STREAM).then(events=[updated(1)])
    after = given(CONSUMER, initialized(), updated(1), updated(2))
    after.when(built(train(1), 1), stream=STREAM).then_nothing()


def test_a_skipped_step_makes_no_version() -> None:
    world = given(CONSUMER, initialized(), updated(1))
    [step] = steps(world, 4)
    assert (step.base, step.taken) == (version(1), 1)
    after = given(CONSUMER, initialized(), updated(1), updated(4))
    [step] = steps(after, 5)
    assert (step.base, step.taken) == (version(4), 2)


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        (FailureCategory.CRASH, "crash"),
        (FailureCategory.VALIDATION, "error"),
        (FailureCategory.REPLAY_DIVERGED, "error"),
    ],
)
def test_a_learner_that_gives_up_fails_the_policy_once(
    category: FailureCategory, kind: str
) -> None:
    for effect, step, before in (
        (InitializePolicy(spec=SPEC), 0, ()),
        (train(1), 1, (initialized(),)),
    ):
        failed = Failed(effect, category, "no model at /m")
        when = given(CONSUMER, *before).when(failed, stream=STREAM)
        [event] = when.events
        assert isinstance(event, PolicyFailed)
        assert (event.step, event.kind) == (step, kind)
        assert event.message == f"{category}: no model at /m"
        when.after().when(failed, stream=STREAM).then_nothing()
        when.after().when(assembled(1)).then_nothing()
        when.after().when(started()).then_nothing()


def test_a_late_failure_of_a_known_step_decides_nothing() -> None:
    failed = Failed(train(1), FailureCategory.CRASH, "died")
    given(CONSUMER, initialized(), updated(1)).when(failed, stream=STREAM).then_nothing()


def test_small_versions_are_all_stored_whole_and_large_ones_now_and_then() -> None:
    [small] = steps(given(CONSUMER, initialized(size=SMALL_STATE_BYTES // 2 - 1)), 1)
    assert (small.durable, small.pinned) == (True, False)
    large = given(CONSUMER, initialized(size=SMALL_STATE_BYTES // 2))
    assert [steps(large, s)[0].durable for s in (1, 9, 10, 11)] == [False, False, True, False]


def test_the_interval_can_be_set() -> None:
    spec = train_spec(advanced={"state_interval": 3})
    world = given(CONSUMER, initialized(spec))
    assert [steps(world, s)[0].durable for s in (1, 2, 3, 6)] == [False, False, True, True]


def test_versions_of_checkpoints_and_validations_are_pinned() -> None:
    spec = train_spec(checkpoints={"eval_interval": 4}, advanced={"state_interval": 3})
    world = given(CONSUMER, initialized(spec))
    whole = {s: steps(world, s, durable=s == 2)[0] for s in (1, 2, 3, 4)}
    assert [whole[s].pinned for s in (1, 2, 3, 4)] == [False, True, False, True]
    assert [whole[s].durable for s in (1, 2, 3, 4)] == [False, True, True, True]
    [event] = world.when(built(whole[2], 2), stream=STREAM).events
    assert isinstance(event, PolicyUpdated)
    assert event.pinned


def collected(*updates: PolicyUpdated, spec: TrainSpec = SPEC) -> list[str]:
    """Everything that is discarded while these steps are taken, in order."""
    found: list[str] = []
    for taken in range(len(updates)):
        world = given(CONSUMER, initialized(spec), *updates[:taken])
        [step] = steps(world, updates[taken].step)
        found += [artifact.uri for artifact in step.retired]
    return found


def test_of_loose_versions_the_two_newest_are_kept() -> None:
    updates = [updated(step) for step in range(1, 7)]
    assert collected(*updates) == [ref(n).uri for n in ("s1", "w1", "s2", "w2", "s3", "w3")]


def test_pinned_versions_stay() -> None:
    updates = [updated(step, pinned=step in (2, 3)) for step in range(1, 7)]
    assert collected(*updates) == [ref("s1").uri, ref("w1").uri]


def test_a_version_that_skipped_steps_are_aliases_of_stays() -> None:
    updates = [updated(step) for step in (1, 2, 4, 5, 6, 7)]
    assert collected(*updates) == [ref(n).uri for n in ("s1", "w1", "s4", "w4")]


def alike(*, like: int, step: int, pinned: bool = False) -> PolicyUpdated:
    """A step that changed no weight, so its version equals the one before it."""
    changed = updated(step, pinned=pinned)
    same = updated(like).state.weights
    return changed.model_copy(update={"state": changed.state.model_copy(update={"weights": same})})


@pytest.mark.parametrize(
    "updates",
    [
        (alike(like=0, step=1), alike(like=0, step=2)),
        (updated(1, pinned=True), alike(like=1, step=2), alike(like=1, step=3)),
        (updated(1), alike(like=1, step=2, pinned=True)),
        (updated(1), updated(2), alike(like=2, step=4)),  # step 3 is an alias of 2
    ],
    ids=["as the first", "as a pinned one before", "as a pinned one after", "as one with an alias"],
)
def test_weights_that_a_kept_version_shares_are_never_collected(
    updates: tuple[PolicyUpdated, ...],
) -> None:
    later = [updated(step) for step in range(updates[-1].step + 1, updates[-1].step + 8)]
    shared = updates[-1].state.weights
    assert shared is not None
    gone = collected(*updates, *later)
    assert shared.uri not in gone
    assert ref(f"w{later[0].step}").uri in gone


def test_weights_that_versions_share_are_collected_with_the_last_of_them() -> None:
    updates = [updated(1), updated(2), alike(like=2, step=3), *(updated(n) for n in range(4, 9))]
    weights = [uri for uri in collected(*updates) if uri in {ref(f"w{n}").uri for n in range(9)}]
    assert weights == [ref(n).uri for n in ("w1", "w2", "w4", "w5")]


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("state_interval", [1, 2, 100])
@pytest.mark.parametrize("skipped", [(), (3, 4, 9)])
def test_versions_of_groups_and_checkpoints_are_never_collected(
    depth: int, interval: int, state_interval: int, skipped: tuple[int, ...]
) -> None:
    """The weights that groups of any later step sample with are kept, whatever the pace, and only a
    few more versions are kept with them."""
    pace, last = Pace(depth, interval), 24
    spec = train_spec(
        advanced={
            "execution_mode": "fully_async",
            "max_steps_off_policy": depth,
            "weight_sync_interval": interval,
        }
    )
    taken = [step for step in range(1, last) if step not in skipped]
    pinned = {step for step in taken if step % 7 == 0}
    events: list[PolicyUpdated] = []
    gone: set[str] = set()
    for step in taken:
        [asked] = steps(given(CONSUMER, initialized(spec), *events), step)
        gone |= {artifact.uri for artifact in asked.retired}
        whole = step in pinned or step % state_interval == 0
        weights = updated(step).state.model_copy(update={} if whole else {"state": None})
        events.append(updated(step, pinned=step in pinned).model_copy(update={"state": weights}))
        made = [0, *(event.step for event in events)]
        wanted = {
            max(v for v in made if v <= pace.pinned_version(s)) for s in range(step + 1, last)
        }
        wanted |= {v for v in made if v in pinned or v + 1 in skipped}
        assert not gone & {ref(f"w{version}").uri for version in wanted}
    kept = len(events) - len({uri for uri in gone if uri in {ref(f"w{v}").uri for v in taken}})
    assert kept <= len(pinned) + depth + interval + 2 * RECOVERY_KEPT + len(skipped)


def test_in_sft_nobody_needs_the_weights_of_a_loose_version() -> None:
    updates = [updated(step) for step in range(1, 5)]
    assert collected(*updates, spec=SFT) == [ref("s1").uri, ref("w1").uri]


def test_the_state_survives_a_snapshot_and_stays_small() -> None:
    state = evolve(PolicyState(), initialized())
    for step in range(1, 50):
        state = evolve(state, updated(step))
    assert len(state.recovery_versions) == len(state.sampler_versions) == 3
    adapter = TypeAdapter(PolicyState)
    assert adapter.validate_json(adapter.dump_json(state)) == state
