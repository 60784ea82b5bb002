"""Resuming at every step gives the same bits as never stopping, for every objective, with LoRA and
full tuning. Everything that resume needs is in the state; without any part of it the bits
differ."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from schemas.errors import CorruptData
from schemas.learner import LearnerJob, LearnerState, StepResult
from tests.unit.trainer.support import Shelf, job, weights_of, with_state
from tests.unit.trainer.test_learner import play
from tests.unit.trainer.variants import VARIANTS
from trainer.engine import Engine
from trainer.objective import value_loss

NUM_STEPS = 3
SCHEDULE = {"warmup_steps": 2, "lr_schedule": "cosine", "grad_clip": 0.5, "weight_decay": 0.01}


async def straight(engine: Engine, asked: LearnerJob) -> list[StepResult]:
    results = [await engine.learner.initialize(asked)]
    for step in range(1, NUM_STEPS + 1):
        results.append(await engine.learner.step(asked, play(step), export_state=True))
    return results


RESUMED: Mapping[str, Mapping[str, Any]] = {
    **VARIANTS,
    "online_dpo": {"algorithm": "online_dpo"},
    "muon": {"optimizer": "muon"},
    "dora": {"lora_variant": "dora", "kl_coef": 0.05},
    "dora, muon": {"lora_variant": "dora", "optimizer": "muon", "updates_per_step": 2},
    "muon, ppo": {"optimizer": "muon", "algorithm": "ppo", "updates_per_step": 2},
}
CASES = [
    (variant, tuning)
    for variant, keys in RESUMED.items()
    for tuning in (("lora",) if "lora_variant" in keys else ("lora", "full"))
]


async def load_exported(engine: Engine, asked: LearnerJob, state: LearnerState) -> None:
    """Load a version as it was exported."""
    try:
        await engine.learner.load(asked, state)
    except CorruptData as error:
        pytest.fail(f"what was exported is not what was loaded: {error}")


@pytest.mark.parametrize(("variant", "tuning"), CASES)
async def test_a_run_resumed_at_any_step_ends_in_the_same_bits(
    engine: Engine, shelf: Shelf, variant: str, tuning: str
) -> None:
    asked = job(**{**SCHEDULE, **RESUMED[variant], "tuning": tuning})
    results = await straight(engine, asked)
    assert len({result.state.weights_sha256 for result in results}) == NUM_STEPS + 1
    other = Engine(fetch=shelf.fetch, threads=1)
    for at in range(NUM_STEPS):
        await load_exported(other, asked, results[at].state)
        resumed = await other.learner.step(asked, play(at + 1), export_state=True)
        assert resumed.state == results[at + 1].state
        assert resumed.metrics == results[at + 1].metrics
        assert resumed.plan == results[at + 1].plan
    await other.aclose()


def changed(state: LearnerState, prefix: str) -> LearnerState:
    """The state with every entry whose name begins with `prefix` set to 0."""
    assert state.state is not None
    tensors = load(state.state)
    touched = {n: torch.zeros_like(t) for n, t in tensors.items() if n.startswith(prefix)}
    assert any(float(tensors[name].abs().max()) > 0 for name in touched)
    data = save({**tensors, **touched}, metadata={"format": "pt"})
    return with_state(state, data)


PARTS = ("critic.value.", "critic.exp_avg.", "critic.exp_avg_sq.", "exp_avg.", "exp_avg_sq.")


@pytest.mark.parametrize("part", PARTS)
async def test_without_any_part_of_the_state_the_bits_differ(engine: Engine, part: str) -> None:
    asked = job(algorithm="ppo")
    results = await straight(engine, asked)
    await engine.learner.load(asked, changed(results[2].state, part))
    other = await engine.learner.step(asked, play(3), export_state=True)
    assert other.state.state_sha256 != results[3].state.state_sha256


async def test_a_critic_s_state_does_not_fit_a_run_without_one(engine: Engine) -> None:
    ppo, grpo = job(algorithm="ppo"), job()
    with_critic = (await engine.learner.initialize(ppo)).state
    without = (await engine.learner.initialize(grpo)).state
    with pytest.raises(CorruptData, match="value"):
        await engine.learner.load(grpo, with_critic)
    with pytest.raises(CorruptData, match="value"):
        await engine.learner.load(ppo, without)


async def test_the_critic_learns_and_is_no_part_of_the_weights(engine: Engine) -> None:
    asked = job(algorithm="ppo", total_steps=40, critic_lr=0.05)
    first = await engine.learner.initialize(asked)
    other = await engine.learner.initialize(job(run="other"))
    assert set(load(weights_of(first.state))) == set(load(weights_of(other.state)))
    await engine.learner.initialize(asked)
    losses = []
    for step in range(1, 41):
        batch = play(1)
        result = await engine.learner.step(
            asked, type(batch)(step, groups=batch.groups), export_state=False
        )
        losses.append(result.metrics["train/value_loss"])
    assert losses[-1] < 0.7 * losses[0]


async def test_more_updates_are_other_bits_and_bring_the_clips_to_bear(engine: Engine) -> None:
    once, twice = job(algorithm="ppo"), job(run="b", algorithm="ppo", updates_per_step=4)
    results = []
    for asked in (once, twice):
        await engine.learner.initialize(asked)
        results.append(await engine.learner.step(asked, play(1), export_state=True))
    assert results[0].state.weights_sha256 != results[1].state.weights_sha256
    assert results[0].metrics["train/value_clip_ratio"] == 0.0


async def test_an_update_that_is_not_finite_moves_neither_policy_nor_critic(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job(algorithm="ppo", updates_per_step=3)
    zero = await engine.learner.initialize(asked)
    unbroken = value_loss.value_loss

    def broken(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, clipped = unbroken(*args, **kwargs)
        return loss * float("nan"), clipped

    monkeypatch.setattr(value_loss, "value_loss", broken)
    result = await engine.learner.step(asked, play(1), export_state=True)
    assert result.metrics["train/skipped"] == 1.0
    assert result.state.weights == zero.state.weights
    assert zero.state.state is not None
    assert result.state.state is not None
    before, after = load(zero.state.state), load(result.state.state)
    assert all(torch.equal(before[name], after[name]) for name in before if name != "step")
