"""The learner is deterministic, and resuming at any step gives the same result as never
stopping."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors

from schemas.errors import CorruptData, FailureCategory, Refused, TransientError
from schemas.learner import (
    RULES,
    Conversation,
    GradedGroup,
    LearnerJob,
    LearnerState,
    StepBatch,
    StepResult,
)
from schemas.sampling import ModelRef, SampleFailure, SampleRecord, Turn, sequences_of
from tests.unit.trainer.batches import parts_of
from tests.unit.trainer.support import Shelf, job, weights_of, with_state
from trainer import grpo
from trainer.engine import Engine
from trainer.native.compile import load_library
from trainer.objective.batch import PreparedBatch
from trainer.policy import Policy

NUM_STEPS = 5


def talk(step: int) -> StepBatch:
    rows = tuple(
        Conversation(i, (("user", f"{step} + {i}?"), ("assistant", f"{step + i}")))
        for i in range(6)
    )
    return StepBatch(step, conversations=rows)


def play(step: int) -> StepBatch:
    """Groups whose samples are the same at every call."""
    groups = []
    for slot in range(3):
        prompt = (3, 10 + slot, 11 + step, 6, 4)
        turns = [
            Turn(
                prompt_ids=prompt,
                completion_ids=tuple(20 + (slot + i + j) % 50 for j in range(3 + i)),
                logprobs=tuple(-4.5 - 0.01 * j for j in range(3 + i)),
                text="",
                finish_reason="length",
            )
            for i in range(3)
        ]
        samples = tuple(
            SampleRecord(index=i, sequences=sequences_of((turn,)), truncated=i == 0)
            for i, turn in enumerate(turns)
        )
        rewards = (1.0, 0.0, None if slot == 2 else 0.5)
        groups.append(GradedGroup(slot, samples, rewards, parts_of(rewards)))
    return StepBatch(step, groups=tuple(groups))


CASES = {
    "lora grpo": (job(kl_coef=0.05, warmup_steps=2, lr_schedule="linear"), play),
    "full grpo": (job(tuning="full", weight_decay=0.1, micro_batch_tokens=32), play),
    "lora sft": (job(algorithm="sft", lr_schedule="cosine"), talk),
    "full sft": (job(algorithm="sft", tuning="full", grad_clip=0.1), talk),
}


async def undisturbed(
    engine: Engine, asked: LearnerJob, batches: Callable[[int], StepBatch]
) -> list[StepResult]:
    results = [await engine.learner.initialize(asked)]
    for step in range(1, NUM_STEPS + 1):
        results.append(await engine.learner.step(asked, batches(step), export_state=True))
    return results


@pytest.mark.parametrize("case", CASES)
async def test_resuming_at_every_step_equals_never_stopping(
    engine: Engine, shelf: Shelf, case: str
) -> None:
    asked, batches = CASES[case]
    straight = await undisturbed(engine, asked, batches)
    for at in range(NUM_STEPS):
        other = Engine(fetch=shelf.fetch, threads=1)
        await other.learner.load(asked, straight[at].state)
        resumed = await other.learner.step(asked, batches(at + 1), export_state=True)
        await other.aclose()
        assert resumed.state == straight[at + 1].state
        assert resumed.metrics == straight[at + 1].metrics
        assert resumed.plan == straight[at + 1].plan


async def test_without_the_moments_a_resumed_step_has_other_bits(engine: Engine) -> None:
    asked, batches = CASES["lora grpo"]
    straight = await undisturbed(engine, asked, batches)
    fresh = (await engine.learner.initialize(asked)).state
    mixed = straight[2].state
    moments = _renumbered(fresh.state, 2)
    await engine.learner.load(asked, with_state(mixed, moments))
    other = await engine.learner.step(asked, batches(3), export_state=True)
    assert other.state.weights_sha256 != straight[3].state.weights_sha256


def _renumbered(state: bytes | None, step: int) -> bytes:
    from safetensors.torch import load, save

    assert state is not None
    return save({**load(state), "step": torch.tensor(step)}, metadata={"format": "pt"})


@pytest.mark.parametrize("case", CASES)
async def test_steps_learn_and_metrics_are_finite(engine: Engine, case: str) -> None:
    asked, batches = CASES[case]
    results = await undisturbed(engine, asked, batches)
    hashes = {r.state.weights_sha256 for r in results}
    assert len(hashes) == NUM_STEPS + 1
    for result in results[1:]:
        assert {"train/loss", "train/grad_norm", "train/entropy_loss", "train/lr"} <= set(
            result.metrics
        )
        assert all(v == v and abs(v) != float("inf") for v in result.metrics.values())
        assert sum(result.plan) == result.metrics["train/tokens"]
        assert set(result.versions) == {"torch", "device", "threads", "kernels", "rules"}


async def test_a_result_says_what_its_kernels_were_for_bits_depend_on_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kernels(run: str, **advanced: Any) -> str:
        result = await engine.learner.initialize(job(run=run, **advanced))
        return result.versions["kernels"]

    made = load_library("learn")
    if made is not None and not torch.cuda.is_available():
        assert await kernels("a") == Path(made._name).stem
    assert await kernels("b", deterministic=True) == "torch"
    assert await kernels("c", tuning="full") == "torch"
    monkeypatch.setattr("trainer.policy.learner_pass", lambda *_, **__: None)
    assert await kernels("d") == "torch"


async def test_a_wide_model_is_trained_in_c_under_the_rules_of_today(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.native.supported_models.MOST_HIDDEN", 16)  # the tiny model is wide
    made = load_library("learn")
    for rules, in_c in ((5, False), (6, True), (RULES, True)):
        asked = replace(job(run=f"wide{rules}"), rules=rules)
        kernels = (await engine.learner.initialize(asked)).versions["kernels"]
        has_pass = in_c and made is not None and not torch.cuda.is_available()
        assert kernels.startswith("learn-") == has_pass
    monkeypatch.setattr("trainer.forward.fused_pass.COPY_BYTES", 1000)
    large = await engine.learner.initialize(job(run="large"))
    assert large.versions["kernels"] == "torch", "a base that is too large stays in torch"


async def test_a_run_keeps_the_rules_that_it_began_with(engine: Engine) -> None:
    """A run that was recorded before groups were divided is replayed, and continues, undivided."""
    plans = {}
    for rules in (1, RULES):
        asked = replace(job(run=f"rules{rules}", micro_batch_tokens=16), rules=rules)
        await engine.learner.initialize(asked)
        result = await engine.learner.step(asked, play(1), export_state=False)
        plans[rules] = result.plan
        assert result.versions["rules"] == str(rules)
    assert max(plans[1]) > 16
    assert max(plans[RULES]) <= 16
    assert sum(plans[RULES]) > sum(plans[1]), "the prompt is repeated"


async def test_sft_lowers_its_loss(engine: Engine) -> None:
    asked = job(algorithm="sft", tuning="full", total_steps=30)
    await engine.learner.initialize(asked)
    losses = []
    for step in range(1, 31):
        batch = StepBatch(step, conversations=talk(1).conversations)
        result = await engine.learner.step(asked, batch, export_state=False)
        losses.append(result.metrics["train/loss"])
        assert result.state.state is None
    assert losses[-1] < 0.3 * losses[0]


async def test_grpo_reports_what_it_saw(engine: Engine) -> None:
    asked, _ = CASES["lora grpo"]
    await engine.learner.initialize(asked)
    metrics = (await engine.learner.step(asked, play(1), export_state=True)).metrics
    assert metrics["rollout/response_lengths"] == 4
    assert metrics["rollout/total_lengths"] == 9
    assert metrics["rollout/truncated_ratio"] == pytest.approx(1 / 3)
    assert metrics["train/lr"] == pytest.approx(0.005)
    assert {"train/kl", "train/clip_ratio", "train/sampler_mismatch"} <= set(metrics)


async def test_failed_samples_train_nothing(engine: Engine) -> None:
    asked = job()
    zero = await engine.learner.initialize(asked)
    failed = SampleRecord(
        index=0, failure=SampleFailure(category=FailureCategory.TIMEOUT, message="slow")
    )
    batch = StepBatch(1, groups=(GradedGroup(0, (failed, failed), (None, None)),))
    result = await engine.learner.step(asked, batch, export_state=True)
    assert result.state.weights == zero.state.weights
    assert result.metrics["train/grad_norm"] == 0.0
    assert result.plan == ()


async def test_the_seed_decides_version_zero(engine: Engine) -> None:
    hashes = [
        (await engine.learner.initialize(job(run=str(i), seed=seed))).state.weights_sha256
        for i, seed in enumerate((1, 1, 2))
    ]
    assert hashes[0] == hashes[1] != hashes[2]


async def test_holds_only_these_bits_of_this_step(engine: Engine) -> None:
    asked, batches = CASES["lora grpo"]
    zero = (await engine.learner.initialize(asked)).state
    assert engine.learner.holds(asked, 0, zero.weights_sha256, zero.state_sha256)
    assert not engine.learner.holds(asked, 1, zero.weights_sha256, zero.state_sha256)
    assert not engine.learner.holds(asked, 0, zero.state_sha256, zero.state_sha256)
    await engine.learner.step(asked, batches(1), export_state=True)
    assert not engine.learner.holds(asked, 0, zero.weights_sha256, zero.state_sha256)
    with pytest.raises(TransientError, match="version 2"):
        await engine.learner.step(asked, batches(3), export_state=True)


async def test_a_failed_step_is_forgotten(engine: Engine) -> None:
    asked = CASES["lora sft"][0]
    zero = (await engine.learner.initialize(asked)).state
    bad = StepBatch(1, conversations=(Conversation(0, (("user", "hi"),)),))
    with pytest.raises(Refused, match="row 0"):
        await engine.learner.step(asked, bad, export_state=True)
    assert not engine.learner.holds(asked, 0, zero.weights_sha256, zero.state_sha256)


async def test_bytes_that_do_not_fit_are_refused(engine: Engine) -> None:
    asked = job()
    zero = (await engine.learner.initialize(asked)).state
    other = (await engine.learner.initialize(job(run="b", lora_rank=2))).state
    for weights, optimizer, step, says in (
        (other.weights, zero.state, 0, "has shape .* tensors differ.* experiment.model_path"),
        (zero.weights, other.state, 0, "optimizer"),
        (zero.weights, None, 0, "has no optimizer state"),
        (zero.weights, zero.state, 3, "of step 0, not 3"),
        (b"no tensors", zero.state, 0, "not a safetensors file"),
        (weights_of(zero)[:-8], zero.state, 0, "not a safetensors file"),
    ):
        with pytest.raises(CorruptData, match=says):
            await engine.learner.load(asked, LearnerState(step, weights, "", optimizer, ""))


async def test_gradients_that_are_not_finite_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = job()
    zero = await engine.learner.initialize(asked)
    accumulate = grpo.accumulate_gradients

    def endless(policy: Policy, batch: PreparedBatch) -> Any:
        """The loss is finite, one gradient is not."""
        found = accumulate(policy, batch)
        gradient = next(iter(policy.tensors.values())).grad
        assert gradient is not None
        gradient.fill_(float("inf"))
        return found

    monkeypatch.setattr(grpo, "accumulate_gradients", endless)
    result = await engine.learner.step(asked, play(1), export_state=True)
    assert result.state.weights == zero.state.weights
    assert result.metrics["train/skipped"] == 1.0
    assert all(v == v and abs(v) != float("inf") for v in result.metrics.values())


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
@pytest.mark.parametrize("updates", [1, 3])
async def test_a_loss_that_is_not_finite_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, loss: float, updates: int
) -> None:
    """Also if its gradients are finite, and if the updates of the step before it were. The moments are
    those of the version before as well."""
    asked = job(updates_per_step=updates)
    first = await play_first(engine, asked)
    accumulate, num_updates = grpo.accumulate_gradients, [0]

    def endless(*given: Any) -> Any:
        metrics, plan = accumulate(*given)
        num_updates[0] += 1
        return (metrics | {"train/loss": loss} if num_updates[0] == updates else metrics), plan

    monkeypatch.setattr(grpo, "accumulate_gradients", endless)
    result = await engine.learner.step(asked, play(2), export_state=True)
    assert num_updates[0] == updates
    assert result.metrics["train/skipped"] > 0
    assert result.state.weights == first.weights
    before, after = (load_tensors(state.state or b"") for state in (first, result.state))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert name == "step" or torch.equal(tensor, after[name]), name
    monkeypatch.undo()  # the twin: a step with a finite loss does change them
    twin = await engine.learner.step(asked, play(3), export_state=True)
    assert twin.state.weights != first.weights


async def play_first(engine: Engine, asked: LearnerJob) -> LearnerState:
    await engine.learner.initialize(asked)
    return (await engine.learner.step(asked, play(1), export_state=True)).state


@pytest.mark.parametrize(
    ("case", "knobs"),
    [
        ("lora grpo", ("micro_batch_tokens (it is 4096)", "training.max_response_length (8)")),
        ("full sft", ("micro_batch_tokens", "advanced.max_sequence_length", "tuning = 'lora'")),
    ],
)
async def test_a_step_that_does_not_fit_into_memory_names_the_knobs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, case: str, knobs: tuple[str, ...]
) -> None:
    asked, batches = CASES[case]
    zero = (await engine.learner.initialize(asked)).state

    def full(*_: object, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("trainer.policy.Policy.logprobs", full)
    monkeypatch.setattr("trainer.policy.Policy.outputs", full)
    with pytest.raises(Refused) as refused:
        await engine.learner.step(asked, batches(1), export_state=True)
    for knob in knobs:
        assert knob in refused.value.message
    assert not engine.learner.holds(asked, 0, zero.weights_sha256, zero.state_sha256)


async def test_only_a_few_runs_are_held(engine: Engine) -> None:
    states = [(await engine.learner.initialize(job(run=str(i)))).state for i in range(4)]
    held = [
        engine.learner.holds(job(run=str(i)), 0, s.weights_sha256, s.state_sha256)
        for i, s in enumerate(states)
    ]
    assert held == [False, False, True, True]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ModelRef(kind="directory", name="/nowhere"), "not a model directory"),
        (ModelRef(kind="scratch", name="qwen3-tny"), "there is no shape"),
    ],
)
async def test_a_model_that_cannot_be_loaded_is_refused(
    engine: Engine, model: ModelRef, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        await engine.learner.initialize(job(model))


async def test_an_unknown_lora_target_is_refused(engine: Engine) -> None:
    with pytest.raises(Refused, match="q_proj"):
        await engine.learner.initialize(job(lora_targets=("q_prj",)))
    few = await engine.learner.initialize(job(lora_targets=("q_proj", "v_proj")))
    assert few.state.weights_sha256


async def test_versions_that_the_sampler_holds_do_not_change_under_it(engine: Engine) -> None:
    asked, batches = CASES["full sft"]
    zero = (await engine.learner.initialize(asked)).state
    assert zero.weights_file_sha256 is not None
    kept = engine.sampler._cache._trained.get(zero.weights_file_sha256)
    assert kept is not None
    before = {name: tensor.clone() for name, tensor in kept.items()}
    await engine.learner.step(asked, batches(1), export_state=False)
    assert all(torch.equal(before[name], kept[name]) for name in before)
