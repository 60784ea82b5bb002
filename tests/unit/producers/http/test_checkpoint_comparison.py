"""Two checkpoints compared through the API, and the best one by a metric."""

from collections.abc import Iterator, Sequence

import pytest

from infra.blobs.artifacts import reference
from schemas.events import Event, GroupGraded, RunRequested
from schemas.ids import GroupKey, Purpose
from schemas.sampling import Grade
from schemas.specs import GroupSpec, SampleEntry
from tests.kit.application import Application
from tests.kit.specs import DATASET, ref
from tests.kit.specs import template as group_template
from tests.kit.story import batch_of, beginning, checkpoint, step

pytestmark = pytest.mark.postgres


def graded(run: str, number: int, rewards: Sequence[float]) -> Iterator[Event]:
    """The held-out results of a step: one attempt at each row."""
    for row, reward in enumerate(rewards):
        group = str(GroupKey(f"{run}v{number}", Purpose.EVALUATE, 0, row))
        yield GroupGraded(
            spec=GroupSpec(group=group, row=row, template=group_template()),
            artifact=reference(batch_of(group)),
            entries=(SampleEntry(index=0),),
            grades=(Grade(index=0, reward=reward),),
        )


def run_with_validation(run: str, name: str, *, seed: int = 0) -> Iterator[Event]:
    """The events of a run with two steps, a checkpoint at each, and held-out rows."""
    for event in beginning(run, name, steps=2):
        if isinstance(event, RunRequested):
            advanced = event.config.advanced.model_copy(update={"seed": seed})
            config = event.config.model_copy(update={"advanced": advanced})
            yield event.model_copy(update={"validation": DATASET, "config": config})
        else:
            yield event
    for number in (1, 2):
        yield from step(run, number)
        yield checkpoint(run, number, ref(f"{run}{number}"))


@pytest.fixture
async def told(app: Application) -> Application:
    """Run `first` with held-out results, and run `second` with another seed and fewer results."""
    events = [
        *run_with_validation("r1", "first"),
        *graded("r1", 1, (0.0, 1.0, 0.5, 1.0)),
        *graded("r1", 2, (1.0, 0.0, 0.75, 1.0)),
        *run_with_validation("r2", "second", seed=7),
        *graded("r2", 2, (1.0, 1.0)),
    ]
    for event in events:
        await app.append([event])
    for run, name in (("r1", "first"), ("r2", "second")):
        await app.services.readmodel.names.take("run", name, run)
    return app


async def step_of(told: Application, name: str) -> int:
    """The step of the checkpoint that has this name."""
    found = await told.get(f"/checkpoints/{name}/compare/first@1")
    return int(found["checkpoints"][0]["step"])


async def test_rows_that_flipped_are_found_with_their_difference(told: Application) -> None:
    found = await told.get("/checkpoints/first@1/compare/first@2")
    assert [one["ref"] for one in found["checkpoints"]] == ["first@1", "first@2"]
    assert [one["held_out_reward"] for one in found["checkpoints"]] == [0.625, 0.6875]
    intervals = [one["held_out_interval"] for one in found["checkpoints"]]
    assert intervals[0] == pytest.approx([-0.137, 1.387], abs=1e-3)
    assert found["held_out_difference"] == pytest.approx(0.0625)
    changes = [(row["row"], row["change"], row["difference"]) for row in found["rows"]]
    assert changes == [(0, "gained", 1.0), (1, "lost", -1.0), (2, "same", 0.25), (3, "same", 0.0)]
    assert found["counts"] == {"gained": 1, "lost": 1, "same": 2, "missing": 0}
    assert found["settings"] == []
    assert found["reason"] is None


async def test_settings_that_differ_and_rows_that_one_lacks_are_shown(told: Application) -> None:
    found = await told.get("/checkpoints/first@2/compare/second@2")
    assert {"key": "advanced.seed", "values": ["0", "7"]} in found["settings"]
    assert found["counts"]["missing"] == 2
    missing = [row["row"] for row in found["rows"] if row["difference"] is None]
    assert missing == [2, 3]


async def test_a_checkpoint_without_held_out_results_says_why(told: Application) -> None:
    found = await told.get("/checkpoints/first@1/compare/second@1")
    assert "second@1 has no held-out results" in found["reason"]
    assert found["rows"] == []
    assert found["held_out_difference"] is None
    gone = await told.api.get("/api/v1/checkpoints/first@1/compare/first@9")
    assert gone.status_code == 404


async def test_a_run_without_a_rollout_is_named_as_the_reason(app: Application) -> None:
    for event in run_with_validation("r3", "third"):
        if isinstance(event, RunRequested):
            experiment = event.config.experiment.model_copy(update={"rollout": None})
            config = event.config.model_copy(update={"experiment": experiment})
            event = event.model_copy(update={"config": config})
        await app.append([event])
    await app.services.readmodel.names.take("run", "third", "r3")
    reason = (await app.get("/checkpoints/third@1/compare/third@2"))["reason"]
    assert "run third has no rollout" in reason
    assert "eval_interval" not in reason


async def test_best_with_a_metric_names_the_checkpoint_that_leads_in_it(told: Application) -> None:
    for name, chosen in (
        ("rollout.raw_reward", 2),
        ("train.loss", 2),  # equal at both steps: the latest one
    ):
        assert await step_of(told, f"first@best:{name}") == chosen
    unknown = await told.api.get("/api/v1/checkpoints/first@best:nothing")
    assert unknown.status_code == 404
    assert "rollout/raw_reward" in unknown.json()["detail"]


async def test_of_a_loss_the_lowest_value_is_the_best(told: Application) -> None:
    await told.database.durable.execute(
        "update metric_points set value = 9 where run = 'r1' and key = 'train/loss' and step = 2"
    )
    assert await step_of(told, "first@best:train.loss") == 1
