"""The best checkpoint of a run is not one whose policy crashes more. The tests go from the rows that are
settled to the choice."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from consumers.checkpoint import CONSUMER as SAVE
from consumers.deploy.loading import choose_checkpoint
from consumers.evaluate import CONSUMER as EVALUATE
from consumers.project.event_rows import rows
from infra.names import MemoryNames
from infra.readmodel.rows import PutMetric
from producers.core.lookup import Lookup
from schemas.effects import ChooseCheckpoint, ManifestPut, SaveCheckpoint
from schemas.events import (
    CheckpointRequested,
    EvaluationCompleted,
    EvaluationRequested,
    Event,
    GroupGraded,
    GroupsRequested,
)
from schemas.ids import checkpoint_stream
from schemas.sampling import Grade
from schemas.specs import GroupSpec, SampleEntry
from tests.kit.decider import NOW, When, given
from tests.kit.fakes import bench
from tests.kit.specs import DATASET, ref
from tests.unit.consumers.runs import Story, only, requested, updated

Rewards = tuple[float | None, ...]

STEADY: Rewards = (0.75, 0.5, 1.0, 0.75)
CRASHING: Rewards = (1.0, None, None, 0.9)
"""The rewards of the attempts at each row. Without those that crashed, the second mean is the higher."""


def graded(spec: GroupSpec, rewards: Sequence[float | None], why: str) -> GroupGraded:
    """A group of which the attempts without a reward failed in this way."""
    entries = tuple(
        SampleEntry(index=n, failure=why if reward is None else None, completion_tokens=3)
        for n, reward in enumerate(rewards)
    )
    grades = tuple(Grade(index=n, reward=reward) for n, reward in enumerate(rewards))
    return GroupGraded(spec=spec, artifact=ref(spec.group), entries=entries, grades=grades)


def validate(request: EvaluationRequested, rewards: Rewards, why: str) -> EvaluationCompleted:
    """What a validation ends with whose rows have these rewards, in turn."""
    said = given(EVALUATE).when(request)
    waiting = [spec for asked in only(said, GroupsRequested) for spec in asked.group_specs()]
    world = said.after()
    for spec in waiting:
        first = spec.group_key.slot % len(rewards)
        num = spec.template.num_samples
        said = world.when(graded(spec, (rewards * num)[first : first + num], why))
        world = said.after()
    (done,) = only(said, EvaluationCompleted)
    return done


def save(request: CheckpointRequested) -> Event:
    """The checkpoint that is requested, as its consumer records it."""
    (effect,) = given(SAVE).when(request).effects
    assert isinstance(effect, SaveCheckpoint)
    stream = checkpoint_stream(request.run)
    (saved,) = given(SAVE).when(ManifestPut(effect, ref("manifest")), stream=stream).events
    return saved


class ProjectedCurves:
    """`producers.core.lookup.Curves` of events, as they are projected."""

    def __init__(self, events: Sequence[Event]) -> None:
        written = [write for event in events for write in rows(event, NOW)]
        self._points = [write for write in written if isinstance(write, PutMetric)]

    async def metric_keys(self, run: str) -> list[str]:
        return sorted({point.key for point in self._points})

    async def curve(self, run: str, key: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in self._points if point.key == key]


def played(why: str) -> tuple[Event, ...]:
    """The events of a run of two steps, each with its checkpoint and its validation. Attempts of the
    second version fail in this way."""
    request = requested(
        steps=2,
        training={"n_samples_per_prompt": 4, "rollout_batch_size": 2},
        checkpoints={"checkpoint_save_freq": 1, "eval_interval": 1},
    ).model_copy(update={"validation": DATASET})
    story, saved = Story(request), list[Event]()

    def answer(said: When, rewards: Rewards) -> list[GroupsRequested]:
        for checkpoint in only(said, CheckpointRequested):
            saved.append(save(checkpoint))
            story.tell(saved[-1])
        for validation in only(said, EvaluationRequested):
            story.tell(validate(validation, rewards, why))
        return only(said, GroupsRequested)

    groups = answer(story.begin(), STEADY)
    for step, rewards in ((1, STEADY), (2, CRASHING)):
        for spec in groups[0].group_specs():
            story.tell(graded(spec, rewards, why))
        groups = answer(story.tell(updated(step)), rewards)
    return (request, *story.told, *saved)


@pytest.mark.parametrize(("why", "best"), [("agent_error", 1), ("internal_error", 2)])
async def test_the_checkpoint_whose_policy_crashes_more_is_not_the_best(
    tmp_path: Path, why: str, best: int
) -> None:
    """Twin: attempts that the platform failed are left out, and the second version is the best."""
    world, events = bench(tmp_path), played(why)
    for event in events:
        await world.record(event)
    chosen = await choose_checkpoint(ChooseCheckpoint(run="r1", name="sums"), world.ports)
    assert chosen.served is not None, chosen.reason
    assert chosen.served.step == best
    assert chosen.served.reward == pytest.approx({1: 0.75, 2: 0.95}[best])
    lookup = Lookup(world.ports.log, MemoryNames(), curves=ProjectedCurves(events))
    for ref_of_best in ("r1@best", "r1@best:eval/validation/reward"):
        assert (await lookup.checkpoint(ref_of_best)).ref == f"first@{best}"
