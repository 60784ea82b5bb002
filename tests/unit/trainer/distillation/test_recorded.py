"""The step of distillation with recorded logprobs of a teacher: its loss is that of single passes, in
expectation it is the reverse KL, and nothing but the batch decides on its bits."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from schemas.errors import CorruptData, Refused
from schemas.learner import GradedGroup, StepBatch
from schemas.models.teacher import TeacherRef
from schemas.sampling import ModelRef, ProviderRef
from tests.unit.trainer.batches import GROUPS, MIXED, policy64
from tests.unit.trainer.distillation.test_step import asked, logits_of, moved, run_with, taken
from tests.unit.trainer.support import Shelf
from tests.unit.trainer.test_learner import play
from trainer.distillation.divergence import divergence
from trainer.distillation.recorded import RecordedTeacher, compare_sampled
from trainer.distillation.step import DistillationRun, compared_rows
from trainer.engine import Engine
from trainer.forward.packing import Example
from trainer.policy import Policy

SERVER = ProviderRef(name="big", model="big", base_url="https://10.0.0.5:8000/v1")
ON_SERVER = TeacherRef(
    name="provider:big", model=ModelRef(kind="provider", name="big", provider=SERVER)
)


def recorded(groups: Sequence[GradedGroup], teacher: Policy) -> tuple[GradedGroup, ...]:
    """The groups with the logprobs of this teacher at a temperature of 1, as a server tells them."""

    def read(row: Any) -> Any:
        example = Example(0, row)
        said = [0.0] * len(row.tokens)
        if example.num_actions:
            with torch.no_grad():
                table = logits_of(teacher, example).log_softmax(-1)
            places = [n for n, chosen in enumerate(row.loss_mask) if chosen]
            for at, place in enumerate(places):
                said[place] = float(table[at, row.tokens[place]])
        return row.model_copy(update={"teacher_logprobs": tuple(said)})

    return tuple(
        replace(
            group,
            samples=tuple(
                one.model_copy(update={"sequences": tuple(map(read, one.sequences))})
                for one in group.samples
            ),
        )
        for group in groups
    )


def recorded_run(policy: Policy, **keys: Any) -> DistillationRun:
    run: DistillationRun = run_with(policy, **{"temperature": 1.0, **keys})
    return replace(run, teacher=RecordedTeacher("provider:big"))


def test_the_loss_is_that_of_single_passes() -> None:
    """The ratio to the sampler times the log-ratio to the teacher, as a mean over all actions."""
    policy = policy64()
    teacher = moved(policy)
    groups, run = recorded(MIXED, teacher), recorded_run(policy, tokens=24)
    metrics, gradients, plan = taken(policy, run, groups)
    assert len(plan) > 2
    rows = [row.student for row in compared_rows(groups, run)]
    for tensor in policy.tensors.values():
        tensor.grad = None
    surrogate, value, gaps = torch.zeros((), dtype=torch.float64), 0.0, []
    for example in rows:
        row = example.sequence
        ours = logits_of(policy, example).log_softmax(-1)
        theirs = logits_of(teacher, example).log_softmax(-1).detach()
        places = [place for place, chosen in enumerate(row.loss_mask) if chosen]
        for at, place in enumerate(places):
            now, said = ours[at, row.tokens[place]], theirs[at, row.tokens[place]]
            ratio = math.exp(float(now.detach()) - row.logprobs[place])
            gap = float(now.detach() - said)
            value += ratio * gap
            surrogate = surrogate + ratio * gap * now
            gaps.append(gap)
    (surrogate / len(gaps)).backward()
    assert metrics["train/loss"] == pytest.approx(value / len(gaps), abs=1e-9)
    assert metrics["train/teacher_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-9)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, policy.tensors[name].grad, atol=1e-9, rtol=1e-9)


def test_in_expectation_it_is_the_reverse_kl_with_its_gradient() -> None:
    """Summed over all tokens that the sampler could have drawn, whatever policy that was."""
    generator = torch.Generator().manual_seed(3)
    logits, teacher, sampler = (
        torch.randn(1, 7, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    logits.requires_grad_()
    ours, theirs, mu = (table.log_softmax(-1)[0] for table in (logits, teacher, sampler))
    found = compare_sampled(ours, mu, theirs, torch.zeros_like(ours))
    mean = (mu.exp() * found.divergence_M).sum()
    exact = divergence(ours[None], theirs[None], beta=1.0)[0]
    assert float(mean.detach()) == pytest.approx(float(exact.detach()), abs=1e-12)
    (estimated,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(exact, logits)
    assert float(gradient.abs().max()) > 0.01
    torch.testing.assert_close(estimated, gradient, atol=1e-12, rtol=0)


def test_a_token_that_the_teacher_likes_more_becomes_likelier() -> None:
    """In both directions: its sign is that of the distance."""
    student = torch.tensor([-2.0, -2.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    found = compare_sampled(student, student.detach(), teacher, torch.zeros(2))
    (gradient,) = torch.autograd.grad(found.divergence_M.sum(), student)
    assert gradient.tolist() == [-1.0, 1.0]


def test_a_huge_ratio_stays_finite_and_has_no_gradient() -> None:
    student = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = compare_sampled(student, student - 500, student.detach() - 2, torch.zeros(1))
    assert found.divergence_M.tolist() == [2 * math.exp(20)]
    (gradient,) = torch.autograd.grad(found.divergence_M.sum(), student)
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_packing_and_micro_batches_change_nothing(aggregation: str) -> None:
    policy = policy64()
    groups = recorded(MIXED, moved(policy))
    whole = taken(policy, recorded_run(policy, aggregation=aggregation), groups)
    split = taken(policy, recorded_run(policy, tokens=1, aggregation=aggregation), groups)
    assert len(whole[2]) == 1
    assert len(split[2]) > 5
    assert split[0] == pytest.approx(whole[0], abs=1e-11)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(split[1][name], gradient, atol=1e-11, rtol=0)


def test_a_student_that_equals_its_teacher_learns_nothing() -> None:
    policy = policy64()
    frozen = replace(policy, tensors={n: t.detach().clone() for n, t in policy.tensors.items()})
    metrics, gradients, _ = taken(policy, recorded_run(policy), recorded(MIXED, frozen))
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-11)
    assert max(float(g.abs().max()) for g in gradients.values()) < 1e-11


def test_samples_without_recorded_logprobs_are_not_learned_from() -> None:
    policy = policy64()
    with pytest.raises(
        CorruptData, match=r"has 0 log-probabilities of advanced\.teacher 'provider"
    ):
        taken(policy, recorded_run(policy), GROUPS)


@pytest.mark.parametrize("change", [{}, {10: "\ufffd"}, {10: " {ours}"}])
def test_a_vocabulary_with_the_same_texts_is_accepted(change: dict[int, str]) -> None:
    """A decoder may leave the space out that a token begins with. A text with bytes that are not a
    whole character says nothing."""
    base = policy64().loaded.base
    own = {token: str(base.tokenizer.decode([token])) for token in (4, 10, 11)}
    own |= {token: text.format(ours=own[token]) for token, text in change.items()}
    group = replace(GROUPS[0], teacher_tokens=own)
    RecordedTeacher("provider:big").check_vocabulary((group,), base)


@pytest.mark.parametrize("text", ["", "@", "<|im_end|>"])
async def test_a_teacher_with_another_vocabulary_is_refused_by_name(
    engine: Engine, text: str
) -> None:
    run = asked(ON_SERVER)
    await engine.learner.initialize(run)
    batch = told(play(1))
    groups = (replace(batch.groups[0], teacher_tokens={10: text}), *batch.groups[1:])
    with pytest.raises(
        Refused,
        match=r"advanced\.teacher 'provider:big' has another vocabulary than the model of the run: "
        f"token 10 is {re.escape(repr(text))} for the teacher",
    ):
        await engine.learner.step(run, replace(batch, groups=groups), export_state=False)


def told(batch: StepBatch) -> StepBatch:
    """The batch with logprobs of a teacher that finds each token as likely as the others."""

    def read(row: Any) -> Any:
        said = tuple(-4.0 * chosen for chosen in row.loss_mask)
        return row.model_copy(update={"teacher_logprobs": said})

    groups = tuple(
        replace(
            group,
            samples=tuple(
                one.model_copy(update={"sequences": tuple(map(read, one.sequences))})
                for one in group.samples
            ),
        )
        for group in batch.groups
    )
    return replace(batch, groups=groups)


async def test_a_run_resumed_at_any_step_ends_in_the_same_bits(
    engine: Engine, shelf: Shelf
) -> None:
    run = asked(ON_SERVER)
    whole = [await engine.learner.initialize(run)]
    for step in range(1, 4):
        whole.append(await engine.learner.step(run, told(play(step)), export_state=True))
    assert whole[1].state.weights_sha256 != whole[0].state.weights_sha256
    assert all("teacher" not in one.versions for one in whole), "no model of a teacher is here"
    for start in range(3):
        other = Engine(fetch=shelf.fetch, threads=1)
        try:
            await other.learner.load(run, whole[start].state)
            for step in range(start + 1, 4):
                result = await other.learner.step(run, told(play(step)), export_state=True)
            assert result.state.weights_sha256 == whole[-1].state.weights_sha256
            assert result.state.state_sha256 == whole[-1].state.state_sha256
        finally:
            await other.aclose()
