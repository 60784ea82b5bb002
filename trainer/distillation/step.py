"""One training step of on-policy distillation, from the student's samples to updated weights.

    loss = sum_t w_t D_t        D_t: the divergence between student and teacher at action t

The student samples as in reinforcement learning, and at each of its tokens the teacher says what it
would have said (GKD, arXiv 2306.13649). No reward is read. Read this file from `step`, which the learner
calls. The divergence is in `trainer/distillation/divergence.py`. A teacher on a server has read the
samples before, and D_t is an estimate of it (`trainer/distillation/recorded.py`).

We decided:
- The loss is a mean over all actions of the optimizer step (w_t is 1 / all actions), and not over a
  micro-batch. `advanced.loss_aggregation` chooses another weight (`trainer/objective/aggregate.py`).
- Both models read the run's temperature, as the sampler did, and where a grammar allowed only some
  tokens, both distributions are over those.
- D_t is differentiated at the tokens that were sampled. Nothing flows through the sampling, as in GKD.
  So older samples (the asynchronous modes) need no correction: they only decide where the two models are
  compared.
- The teacher has no gradient, and what it predicts is never stored. It is frozen, so a step that is
  taken again computes the same.
- Failed samples are left out. Samples that were cut off are learned like all others.

Shape suffixes: M the actions of a micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from schemas.errors import Refused
from schemas.learner import GradedGroup, LearnerJob
from schemas.models.teacher import SELF
from schemas.sampling import SampleRecord
from schemas.sampling import Sequence as TokenSequence
from trainer.distillation.divergence import Comparison, compare
from trainer.distillation.hint import hinted_row
from trainer.distillation.recorded import RecordedTeacher, compare_sampled
from trainer.distillation.teacher import Teacher, TeacherModel
from trainer.forward.packing import Example, MicroBatch, pack
from trainer.model.chat_template import Chat
from trainer.objective.aggregate import token_weights
from trainer.objective.batch import with_masks
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import k3
from trainer.objective.metrics import Means, rollout_metrics
from trainer.optimizer import Optimizers, StepSize
from trainer.policy import Policy

NO_LIMIT = 1 << 62
BETA = 1.0
"""The reverse KL divergence, which needs no samples of the teacher to have a small variance."""


@dataclass(frozen=True, slots=True)
class DistillationRun:
    """The parts of a run that stay the same over its steps. Of the hyperparameters the temperature, the
    aggregation and the sizes are read."""

    teacher: Teacher | RecordedTeacher
    beta: float
    hyperparameters: Hyperparameters
    chat: Chat


def run_of(
    job: LearnerJob,
    model: TeacherModel | None,
    *,
    student: Policy,
    chat: Chat,
    micro_batch_tokens: int,
) -> DistillationRun:
    """The parts of a run that do not change. Without a model and a server the student is its own
    teacher."""
    advanced = job.config.advanced
    teacher: Teacher | RecordedTeacher
    if job.teacher is not None and job.teacher.server is not None:
        teacher = RecordedTeacher(job.teacher.name)
    else:
        teacher = Teacher(SELF, student) if model is None else model.beside(student)
    return DistillationRun(
        teacher=teacher,
        beta=BETA if advanced.distill_beta is None else advanced.distill_beta,
        hyperparameters=Hyperparameters(
            temperature=job.config.sampling.rollout_temperature,
            aggregation=advanced.loss_aggregation or "token_mean",
            max_response_length=job.config.training.max_response_length,
            micro_batch_tokens=micro_batch_tokens,
        ),
        chat=chat,
    )


def step(
    policy: Policy,
    optimizers: Optimizers,
    groups: Sequence[GradedGroup],
    run: DistillationRun,
    *,
    step_size: StepSize,
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Train the policy on one batch of its samples, in place. Returns the metrics of the step by key,
    and its micro-batch plan: the number of tokens of each micro-batch, in order. Raises Refused when the
    teacher gives a log-probability that is not finite, or has another vocabulary."""
    # 1. The rows of all samples that did not fail, as student and teacher read them, and the weight of
    #    each sample's actions.
    if isinstance(run.teacher, RecordedTeacher):
        run.teacher.check_vocabulary(groups, policy.loaded.base)
    rows = compared_rows(groups, run)
    weight_of = token_weights([row.student for row in rows], run.hyperparameters)

    # 2. Forward and backward, one micro-batch after the other.
    means, plan = Means(), []
    for micro, read in micro_batches(policy, rows, run):
        micro_batch_loss(policy, micro, read, weight_of, run, means=means).backward()
        plan.append(micro.num_tokens)

    # 3. Clip the gradients and take an optimizer step at the learning rate of this training step.
    metrics = means.values()
    metrics |= optimizers.update(step_size, loss=metrics.get("train/loss", 0.0))

    # 4. Report how far the student is from the teacher, and the lengths of the samples.
    return metrics | rollout_metrics(groups), tuple(plan)


def micro_batch_loss(
    policy: Policy,
    micro: MicroBatch,
    read: MicroBatch,
    weight_of: dict[int, float],
    run: DistillationRun,
    *,
    means: Means,
) -> torch.Tensor:
    """The share of the step's loss that this micro-batch contributes, a scalar with a gradient. `read`
    has the same actions as the teacher reads them. Metrics are added to `means`."""
    found = compare_at_actions(policy, micro, read, run)
    check_finite(found, micro, run.teacher)

    weights = [weight_of[sample] for sample in micro.sample_M.tolist()]
    weight_M = torch.tensor(weights, dtype=torch.float64).to(found.divergence_M)
    loss = (weight_M * found.divergence_M).sum()
    means.add_sum("train/loss", loss)
    means.add("train/entropy_loss", found.entropy_M)
    means.add("train/teacher_kl", found.student_M - found.teacher_M)
    behaviour_M = micro.behaviour_M.to(found.student_M)
    means.add("train/sampler_kl", k3(behaviour_M - found.student_M))
    means.add("train/sampler_mismatch", (found.student_M - behaviour_M).abs())
    return loss


def compare_at_actions(
    policy: Policy, micro: MicroBatch, read: MicroBatch, run: DistillationRun
) -> Comparison:
    """Student and teacher at each action of a micro-batch."""
    temperature = run.hyperparameters.temperature
    if isinstance(run.teacher, RecordedTeacher):
        student_M, entropy_M = policy.logprobs(micro, temperature=temperature)
        return compare_sampled(student_M, micro.behaviour_M, read.behaviour_M, entropy_M.detach())
    # The teacher first: it keeps nothing for a backward pass.
    teacher = replace(run.teacher.predictions(read), allowed=micro.allowed)
    student = replace(policy.predictions(micro), allowed=micro.allowed)
    return compare(
        student,
        teacher,
        micro.target_M,
        beta=run.beta,
        temperature=temperature,
        chunk_elements=policy.forward.chunk_elements(policy.device),
    )


def check_finite(found: Comparison, micro: MicroBatch, teacher: Teacher | RecordedTeacher) -> None:
    """Raises Refused if the teacher's log-probability of a sampled token is not finite."""
    bad = torch.isfinite(found.teacher_M).logical_not().nonzero()[:, 0].tolist()
    if not bad:
        return
    first = bad[0]
    raise Refused(
        f"advanced.teacher {teacher.name!r} gives the token {int(micro.target_M[first])} of sample "
        f"{int(micro.sample_M[first])} of the batch a log-probability of "
        f"{float(found.teacher_M[first])}, which cannot be learned from ({len(bad)} tokens in all). "
        "Check its weights, or name another teacher"
    )


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A training row, and the row with the same actions that the teacher reads in its place."""

    student: Example
    teacher: Example


def compared_rows(groups: Sequence[GradedGroup], run: DistillationRun) -> tuple[ComparedRow, ...]:
    """The training rows with an action of all samples that did not fail, in canonical order. Samples are
    numbered across groups. A row with a token that the teacher's model does not have is left out: the
    student sampled it from the padding of its output head. Raises Refused when a hint cannot be placed,
    and when a row is too long for the teacher."""
    found, number = [], 0
    for group in groups:
        for sample in group.samples:
            for place, row in enumerate(sample.sequences if sample.failure is None else ()):
                student = Example(number, row)
                read = read_row(place, sample, group, run) if student.num_actions else None
                if read is not None:
                    found.append(ComparedRow(student, Example(number, read)))
            number += 1
    return tuple(found)


def read_row(
    place: int, sample: SampleRecord, group: GradedGroup, run: DistillationRun
) -> TokenSequence | None:
    """A row of a sample as the teacher reads it. None if the teacher's model lacks a token of it."""
    row = sample.sequences[place]
    if isinstance(run.teacher, RecordedTeacher):
        return run.teacher.read(row)
    if max(row.tokens) >= run.teacher.num_tokens:
        return None
    read = hinted_row(place, sample, group, chat=run.chat)
    run.teacher.check_length(len(read.tokens))
    return read


def micro_batches(
    policy: Policy, rows: Sequence[ComparedRow], run: DistillationRun
) -> Iterator[tuple[MicroBatch, MicroBatch]]:
    """The micro-batches of the student in order, each with what the teacher reads: the same actions. The
    samples of a group share their prompt if the models that are computed here support that."""
    share, device = policy.shares_prompts, policy.device
    if isinstance(run.teacher, Teacher):
        share = share and run.teacher.policy.shares_prompts
    first = 0
    for micro in pack(
        with_masks([row.student for row in rows], policy),
        micro_batch_tokens=run.hyperparameters.micro_batch_tokens,
        share=share,
        prefixes=policy.shares_prefixes,
        device=device,
    ):
        own = rows[first : first + micro.num_rows]
        first += micro.num_rows
        if all(row.teacher == row.student for row in own):
            yield micro, micro
        else:
            (read,) = pack(
                [row.teacher for row in own],
                micro_batch_tokens=NO_LIMIT,
                share=share,
                prefixes=policy.shares_prefixes,
                device=device,
            )
            yield micro, read
