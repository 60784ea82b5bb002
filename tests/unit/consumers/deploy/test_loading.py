"""The work of deployments: the limit holds, vanished weights are named, and the best checkpoint of a run
is the one with the highest held-out reward."""

from pathlib import Path

import pytest

from consumers.deploy.loading import choose_checkpoint, load_model
from schemas.deployments import ServedModel
from schemas.effects import CheckpointChosen, ChooseCheckpoint, LoadModel
from schemas.errors import NotFound, Refused
from schemas.events import EvaluationSettled, RunRenamed
from schemas.sampling import ModelRef, PolicyRef, SampleRequest, Turn
from tests.kit.fakes import FakeSampler, bench, turn
from tests.kit.specs import ref
from tests.kit.story import beginning, checkpoint

SERVED = ServedModel(
    name="sums",
    base_name="tiny",
    model=ModelRef(kind="scratch", name="tiny"),
    policy=PolicyRef(version=2),
    lora_alpha=32,
    run="r1",
    run_name="calm-otter",
    step=2,
)


def load(others: int = 0) -> LoadModel:
    return LoadModel(request="q", served=SERVED, others=others)


async def test_a_checkpoint_is_loaded_by_sampling_one_token(tmp_path: Path) -> None:
    sampler = FakeSampler(lambda request: turn("1"))
    await load_model(load(others=4), bench(tmp_path, sampler=sampler).ports)
    [asked] = sampler.requests
    assert (asked.policy.version, asked.params.max_new_tokens) == (2, 1)


async def test_one_more_than_the_setting_allows_is_refused(tmp_path: Path) -> None:
    sampler = FakeSampler(lambda request: turn("1"))
    with pytest.raises(Refused, match="HEADRACE_MAX_DEPLOYMENTS allows 5"):
        await load_model(load(others=5), bench(tmp_path, sampler=sampler).ports)
    assert sampler.requests == []


async def test_weights_that_vanished_are_named(tmp_path: Path) -> None:
    def vanish(request: SampleRequest) -> Turn:
        raise NotFound("artifact w does not exist any more")

    with pytest.raises(Refused, match="the weights of calm-otter@2 do not exist any more"):
        await load_model(load(), bench(tmp_path, sampler=FakeSampler(vanish)).ports)


async def choose(
    directory: Path, rewards: dict[int, float | None], *, name: str = "sums", steps: int = 3
) -> CheckpointChosen:
    """The choice for a run with a checkpoint after each step, and these held-out rewards."""
    world = bench(directory)
    requested = next(beginning("r1", "first", steps=steps))
    saved = [checkpoint("r1", step, ref("manifest")) for step in range(1, steps + 1)]
    scores = [
        EvaluationSettled(run="r1", step=step, reward=reward) for step, reward in rewards.items()
    ]
    for event in (requested, *saved, *scores, RunRenamed(run="r1", run_name="renamed")):
        await world.record(event)
    return await choose_checkpoint(ChooseCheckpoint(run="r1", name=name), world.ports)


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ({0: 0.9, 1: 0.2, 2: 0.5, 3: 0.4}, 2),
        ({1: 0.5, 2: 0.5}, 2),
        ({1: 0.3, 2: None}, 1),
        ({3: 0.0}, 3),
    ],
)
async def test_the_checkpoint_with_the_best_held_out_reward_is_chosen(
    tmp_path: Path, rewards: dict[int, float | None], best: int
) -> None:
    chosen = await choose(tmp_path, rewards)
    assert chosen.served is not None, chosen.reason
    assert (chosen.served.step, chosen.served.reward) == (best, rewards[best])
    assert chosen.served.ref == f"renamed@{best}"


async def test_without_a_held_out_reward_or_a_name_nothing_is_chosen(tmp_path: Path) -> None:
    unscored = await choose(tmp_path / "a", {0: 0.9})
    assert unscored.served is None
    assert "validation_dataset" in unscored.reason
    unnamed = await choose(tmp_path / "b", {1: 0.5}, name="No Name")
    assert unnamed.served is None
    assert "deploy_name" in unnamed.reason
