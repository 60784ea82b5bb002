"""Gradients are compared step after step, from the version that each step started from."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from consumers.learn.replay import build_step_batch, job_of
from consumers.regrade.gradients import CONSUMER, perform
from schemas.effects import CompareGradients, Failed, StepGradients
from schemas.errors import FailureCategory, Refused
from schemas.events import (
    BatchAssembled,
    GradientComparisonCompleted,
    GradientsCompared,
    PolicyInitialized,
    PolicyUpdated,
    RegradeCompleted,
    RegradePartGraded,
)
from schemas.events.regrades.figures import RegradeSums
from schemas.events.regrades.groups import RegradedGroup, RegradedGroups
from schemas.ids import gradients_stream
from schemas.learner import LearnerState
from schemas.sampling import Grade, SampleBatch, SampleRecord
from schemas.specs import BatchGroup, StateRef
from tests.kit.decider import given
from tests.kit.fakes import Bench, FakeLearner, bench
from tests.kit.specs import train_spec

STREAM = gradients_stream("g1")
ENDED = RegradeCompleted(regrade="g1", run="r1", status="finished", gradients=True)
FIRST = CompareGradients(regrade="g1", run="r1", after=0)
FOUND = StepGradients(
    FIRST, step=1, cosine=0.5, norm_before=1, norm_after=2, advantages=4, turned=1, groups=2
)
COMPARED = GradientsCompared(
    regrade="g1",
    run="r1",
    step=1,
    cosine=0.5,
    norm_before=1,
    norm_after=2,
    advantages=4,
    turned=1,
    groups=2,
)


def test_gradients_are_compared_only_if_that_was_asked_for() -> None:
    given(CONSUMER).when(ENDED).then(effects=[FIRST])
    given(CONSUMER).when(ENDED.model_copy(update={"gradients": False})).then_nothing()
    given(CONSUMER, COMPARED).when(ENDED).then_nothing()


def test_steps_follow_each_other_until_there_is_none() -> None:
    second = FIRST.model_copy(update={"after": 1})
    decided = given(CONSUMER).when(FOUND, stream=STREAM)
    decided.then(events=[COMPARED], effects=[second])
    decided.after().when(FOUND, stream=STREAM).then_nothing()
    last = StepGradients(second)
    ended = GradientComparisonCompleted(regrade="g1", run="r1", steps=1)
    decided.after().when(last, stream=STREAM).then(events=[ended])


def test_a_comparison_that_cannot_be_made_ends_with_the_reason() -> None:
    [ended] = given(CONSUMER).when(StepGradients(FIRST), stream=STREAM).events
    assert isinstance(ended, GradientComparisonCompleted)
    assert ended.message == "no step of the regrade was trained"
    failed = Failed(FIRST, FailureCategory.REPLAY_DIVERGED, "other bits")
    [ended] = given(CONSUMER).when(failed, stream=STREAM).events
    assert isinstance(ended, GradientComparisonCompleted)
    assert ended.message == "replay_diverged: other bits"


async def stored(world: Bench, state: LearnerState) -> StateRef:
    assert state.weights is not None
    assert state.state is not None
    put = world.ports.artifacts.put_artifact
    return StateRef(
        step=state.step,
        weights_sha256=state.weights_sha256,
        state_sha256=state.state_sha256,
        weights=await put(state.weights, run="r1", blob=True),
        state=await put(state.state, run="r1", blob=True),
    )


async def record_run(world: Bench, learner: FakeLearner) -> None:
    """Record a run of one step with two groups, and a regrade that has new grades of the first one."""
    spec = train_spec()
    zero = await stored(world, (await learner.initialize(job_of(spec))).state)
    await world.record(PolicyInitialized(run="r1", spec=spec, state=zero, versions={}))
    groups = []
    for slot in (0, 1):
        samples = (SampleRecord(index=0), SampleRecord(index=1))
        batch = SampleBatch(group=f"r1-train-1-{slot}-0", samples=samples)
        data = batch.model_dump_json().encode()
        artifact = await world.ports.artifacts.put_artifact(data, run="r1", blob=True)
        groups.append(BatchGroup(slot=slot, replacement=0, artifact=artifact, rewards=(1.0, 0.0)))
    assembled = BatchAssembled(run="r1", step=1, groups=tuple(groups))
    identity = await world.record(assembled)
    made = await learner.step(
        job_of(spec),
        await build_step_batch(world.ports, spec, number=1, groups=groups, rows=()),
        export_state=True,
    )
    await world.record(
        PolicyUpdated(
            run="r1",
            step=1,
            batch=identity,
            state=await stored(world, made.state),
            metrics={},
            plan=(),
            versions={},
        )
    )
    grades = [tuple(Grade(index=i, reward=r) for i, r in enumerate(of)) for of in ((1, 0), (1, 1))]
    group = RegradedGroup(group="r1-train-1-0-0", step=1, before=grades[0], after=grades[1])
    data = RegradedGroups(groups=(group,)).model_dump_json().encode()
    artifact = await world.ports.artifacts.put_artifact(data, run="r1", blob=True)
    part = RegradePartGraded(
        regrade="g1", run="r1", number=1, artifact=artifact, by_step={1: RegradeSums(groups=1)}
    )
    await world.record(part)


async def test_a_step_is_compared_from_the_version_that_it_started_from(tmp_path: Path) -> None:
    learner = FakeLearner()
    world = bench(tmp_path, learner=learner)
    await record_run(world, learner)
    learner.calls.clear()
    found = await perform(FIRST, world.ports)
    assert learner.calls == ["load 0", "compare 1", "step 1"]
    assert (found.step, found.groups, found.missing) == (1, 1, 1)
    assert found.cosine == pytest.approx(1 / math.sqrt(2))
    nothing = await perform(FIRST.model_copy(update={"after": 1}), world.ports)
    assert nothing == replace(StepGradients(FIRST), effect=nothing.effect)


async def test_a_run_without_versions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no version 0"):
        await perform(FIRST, bench(tmp_path, learner=FakeLearner()).ports)
