"""The learn consumer refuses a batch with refuted samples, and takes the step of the next one."""

from uuid import UUID

import pytest

from consumers.learn.attested import MOST_NAMED, MOST_NEIGHBOURS, sampled_version, served_by_server
from consumers.learn.consumer import CONSUMER
from consumers.learn.retention import discardable
from schemas.effects import StepRefused, TrainStep
from schemas.events import BatchAssembled, PolicyUpdated, SampleRefuted
from schemas.learner import GradedGroup, Refutation
from schemas.models.sampling_server import SamplingServer
from schemas.sampling import PolicyRef, SampleRecord
from schemas.specs import TrainSpec
from tests.kit.decider import Given, given
from tests.kit.specs import ref, train_spec, version
from tests.unit.consumers.learn.test_learn import (
    STREAM,
    assembled,
    built,
    initialized,
    started,
    updated,
)

URL = "http://liar:8000"
SPEC = train_spec().model_copy(update={"attests": True})
AHEAD = train_spec(advanced={"execution_mode": "one_step_off_async"})


def begun() -> Given:
    return given(CONSUMER, started(SPEC), initialized(SPEC))


def step_of(world: Given, batch: UUID) -> TrainStep:
    (effect,) = world.when(assembled(1), event_id=batch).effects
    assert isinstance(effect, TrainStep)
    return effect


def refutation(index: int) -> Refutation:
    return Refutation(0, index, URL, "distance", tokens=9, log_e=30.0, distance=0.1)


def refused(effect: TrainStep, number: int = 1) -> StepRefused:
    served = {URL: tuple((0, index) for index in range(100))}
    return StepRefused(effect, tuple(refutation(index) for index in range(number)), served)


def test_a_refused_step_names_its_samples_and_takes_no_step() -> None:
    effect = step_of(begun(), UUID(int=1))
    said = begun().when(refused(effect, 2), stream=STREAM)
    events = said.events
    assert {type(event) for event in events} == {SampleRefuted}
    first = events[0]
    assert isinstance(first, SampleRefuted)
    assert (first.sample, first.server, first.servers) == ("r1-train-1-0-0.0", URL, (URL,))
    assert (first.policy_version, first.slots, first.attempt) == (0, (0,), 1)
    assert first.neighbours[0] == "r1-train-1-0-0.1"
    assert len(first.neighbours) == MOST_NEIGHBOURS
    assert first.batch == UUID(int=1)


def test_the_next_batch_of_the_step_is_another_effect() -> None:
    effect = step_of(begun(), UUID(int=1))
    after = begun().when(refused(effect), stream=STREAM).after()
    again = step_of(after, UUID(int=2))
    assert again.refused == 1
    assert again.id != effect.id
    assert (again.base, again.taken) == (effect.base, effect.taken)
    after.when(refused(effect), stream=STREAM).then_nothing()
    (update,) = after.when(built(again, 1), stream=STREAM).events
    assert isinstance(update, PolicyUpdated)
    assert update.metrics["attest/refused"] == 1.0
    assert Given(CONSUMER, (*after.events, update)).state(STREAM).refused == 0


def test_a_batch_of_wrong_samples_only_names_the_first_of_them() -> None:
    effect = step_of(begun(), UUID(int=1))
    events = begun().when(refused(effect, 90), stream=STREAM).events
    assert len(events) == MOST_NAMED
    assert {event.others for event in events if isinstance(event, SampleRefuted)} == {26}


def test_a_run_that_does_not_attest_requests_the_same_effects_as_before() -> None:
    world = given(CONSUMER, started(), initialized())
    effect = step_of(world, UUID(int=1))
    assert not {"refused", "sampled"} & effect.model_dump().keys()
    (update,) = world.when(built(effect, 1), stream=STREAM).events
    assert isinstance(update, PolicyUpdated)
    assert "attest/refused" not in update.metrics


@pytest.mark.parametrize("is_same", [True, False])
def test_the_version_that_sampled_is_named_only_if_it_is_an_earlier_one(*, is_same: bool) -> None:
    base = version(4)
    policy = PolicyRef(version=4 if is_same else 3, weights=base.weights if is_same else ref("3"))
    message = assembled(5).model_copy(update={"sampled": policy})
    assert isinstance(message, BatchAssembled)
    assert sampled_version(message, base) == (None if is_same else policy)


@pytest.mark.parametrize("attests", [True, False])
def test_weights_that_samples_are_tested_with_are_kept_for_their_step(*, attests: bool) -> None:
    """One step ahead, the samples of step 3 are of version 1."""
    spec: TrainSpec = AHEAD.model_copy(update={"attests": attests})
    updates = [updated(step, durable=False) for step in (1, 2)]
    updates = [
        u.model_copy(
            update={"state": u.state.model_copy(update={"weights": ref(f"weights {u.step}")})}
        )
        for u in updates
    ]
    state = given(CONSUMER, started(spec), initialized(spec), *updates).state(STREAM)
    discarded = {one.uri for one in discardable(state, 3)}
    assert (ref("weights 1").uri in discarded) == (not attests)


def test_samples_are_counted_by_their_server() -> None:
    samples = (
        SampleRecord(index=0),
        SampleRecord(index=1, servers=(SamplingServer(url=URL, noise=0.0),)),
    )
    assert served_by_server([GradedGroup(3, samples, (0.0, 1.0))]) == {
        "built-in": ((3, 0),),
        URL: ((3, 1),),
    }
