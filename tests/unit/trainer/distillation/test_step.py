"""The step of distillation: its loss is that of single passes, packing changes nothing, the teacher is
frozen, and a resumed step has the same bits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from schemas.errors import FailureCategory, Refused
from schemas.learner import GradedGroup, StepBatch
from schemas.models.teacher import TeacherRef, fill_hint
from schemas.sampling import Message, ModelRef, SampleFailure, SampleRecord, ToolSpec
from schemas.sampling import Sequence as TokenSequence
from tests.unit.trainer.batches import GROUPS, MIXED, policy64
from tests.unit.trainer.preferences.test_step import without_decoder
from tests.unit.trainer.support import TINY, Shelf, job, loss_mask, weights_of
from tests.unit.trainer.test_learner import play
from trainer.distillation.step import (
    DistillationRun,
    compared_rows,
    micro_batch_loss,
    micro_batches,
    run_of,
)
from trainer.distillation.teacher import Teacher
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.forward.predictions import Predictions
from trainer.model.chat_template import Chat
from trainer.objective.aggregate import token_weights
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.metrics import Means
from trainer.policy import Policy

HOT = 0.7
"""A temperature at which every distribution differs from that of the bare logits."""


def moved(policy: Policy, *, by: float = 0.3) -> Policy:
    """A frozen policy near this one."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: (t + by * torch.randn(t.shape, generator=generator)).double().detach()
        for name, t in policy.tensors.items()
    }
    return replace(policy, tensors=tensors)


def run_with(teacher: Policy, *, beta: float = 1.0, tokens: int = 4096, **keys: Any) -> Any:
    hyperparameters = Hyperparameters(
        **{
            "temperature": HOT,
            "aggregation": "token_mean",
            "micro_batch_tokens": tokens,
            "max_response_length": 8,
            **keys,
        }
    )
    base = teacher.loaded.base
    chat = Chat(base.tokenizer, base.stop_ids)
    return DistillationRun(Teacher("t", teacher), beta, hyperparameters, chat)


def taken(
    policy: Policy, run: DistillationRun, groups: Sequence[GradedGroup] = MIXED
) -> tuple[dict[str, float], dict[str, torch.Tensor], list[int]]:
    """Metrics, gradients and plan of one step's forward and backward."""
    for tensor in policy.tensors.values():
        tensor.grad = None
    rows, means, plan = compared_rows(groups, run), Means(), []
    weights = token_weights([row.student for row in rows], run.hyperparameters)
    for micro, read in micro_batches(policy, rows, run):
        micro_batch_loss(policy, micro, read, weights, run, means=means).backward()
        plan.append(micro.num_tokens)
    gradients = {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}
    return means.values(), gradients, plan


def logits_of(policy: Policy, example: Example) -> torch.Tensor:
    """The logits (M, V) of the actions of one row, in a pass of its own."""
    (micro,) = pack([example], micro_batch_tokens=4096, share=False)
    return policy.logits(micro)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_single_passes(beta: float) -> None:
    """At the run's temperature, over the whole vocabulary, as a mean over all actions of the step."""
    policy = policy64()
    teacher = moved(policy)
    metrics, gradients, plan = taken(policy, run_with(teacher, beta=beta, tokens=24))
    assert len(plan) > 2
    rows = [row.student for row in compared_rows(MIXED, run_with(teacher))]
    total, ratios = torch.zeros((), dtype=torch.float64), []
    for tensor in policy.tensors.values():
        tensor.grad = None
    for example in rows:
        ours = (logits_of(policy, example) / HOT).log_softmax(-1)
        theirs = (logits_of(teacher, example) / HOT).log_softmax(-1).detach()
        mixture = (beta * theirs.exp() + (1 - beta) * ours.exp()).log()
        if beta == 0.0:
            lost = F.kl_div(ours, theirs, log_target=True, reduction="sum")
        elif beta == 1.0:
            lost = F.kl_div(theirs, ours, log_target=True, reduction="sum")
        else:
            of_teacher = F.kl_div(mixture, theirs, log_target=True, reduction="sum")
            of_student = F.kl_div(mixture, ours, log_target=True, reduction="sum")
            lost = beta * of_teacher + (1 - beta) * of_student
        total = total + lost
        chosen = torch.tensor(
            [
                t
                for t, m in zip(example.sequence.tokens, example.sequence.loss_mask, strict=True)
                if m
            ]
        )
        ratios.append((ours - theirs).detach().gather(-1, chosen[:, None])[:, 0])
    (total / sum(example.num_actions for example in rows)).backward()
    assert metrics["train/loss"] == pytest.approx(
        float(total.detach()) / sum(example.num_actions for example in rows), abs=1e-6
    )
    assert metrics["train/teacher_kl"] == pytest.approx(float(torch.cat(ratios).mean()), abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, policy.tensors[name].grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_packing_and_micro_batches_change_nothing(aggregation: str) -> None:
    policy = policy64()
    teacher = moved(policy)
    metrics, gradients, whole = taken(policy, run_with(teacher, beta=0.5, aggregation=aggregation))
    split, others, plan = taken(
        policy, run_with(teacher, beta=0.5, tokens=1, aggregation=aggregation)
    )
    assert len(whole) == 1
    assert len(plan) == len(compared_rows(MIXED, run_with(teacher)))
    assert split == pytest.approx(metrics, abs=1e-11)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-11, rtol=0)


@pytest.mark.parametrize("which", ["both", "teacher", "student"])
def test_transformers_computes_the_same(which: str) -> None:
    """Its norms round to fp32 internally. Prompts are shared only if both models support that."""
    policy = policy64()
    teacher = moved(policy)
    metrics, gradients, _ = taken(policy, run_with(teacher))
    slow = without_decoder(policy)
    plain, others, _ = taken(
        policy if which == "teacher" else slow,
        run_with(
            teacher if which == "student" else replace(slow, tensors=teacher.tensors), tokens=64
        ),
    )
    assert plain == pytest.approx(metrics, abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-5, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_equals_its_teacher_learns_nothing(beta: float) -> None:
    policy = policy64()
    frozen = replace(policy, tensors={n: t.detach().clone() for n, t in policy.tensors.items()})
    metrics, gradients, _ = taken(policy, run_with(frozen, beta=beta))
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-12)
    assert max(float(g.abs().max()) for g in gradients.values()) < 1e-12


def test_the_teacher_gets_no_gradient() -> None:
    policy = policy64()
    near = moved(policy)
    teacher = replace(near, tensors={n: t.requires_grad_() for n, t in near.tensors.items()})
    taken(policy, run_with(teacher))
    assert all(tensor.grad is None for tensor in teacher.tensors.values())


def test_samples_that_failed_are_left_out() -> None:
    policy = policy64()
    run = run_with(moved(policy))
    failure = SampleFailure(category=FailureCategory.TIMEOUT, message="late")
    first, *others = GROUPS[0].samples
    failed = replace(GROUPS[0], samples=(first.model_copy(update={"failure": failure}), *others))
    kept = replace(GROUPS[0], samples=tuple(others), rewards=GROUPS[0].rewards[1:])
    assert taken(policy, run, (failed,))[0] == pytest.approx(taken(policy, run, (kept,))[0])


def test_rewards_are_not_read() -> None:
    policy = policy64()
    run = run_with(moved(policy))
    unrewarded = tuple(replace(one, rewards=(None,) * len(one.rewards)) for one in GROUPS)
    assert taken(policy, run, unrewarded)[0] == taken(policy, run, GROUPS)[0]


def test_a_teacher_that_answers_nan_is_refused_with_the_token() -> None:
    policy = policy64()
    teacher = moved(policy)
    name = sorted(teacher.tensors)[0]
    tensors = {**teacher.tensors, name: teacher.tensors[name] * float("nan")}
    with pytest.raises(
        Refused, match=r"advanced.teacher 't' gives the token \d+ of sample 0.* nan"
    ):
        taken(policy, run_with(replace(teacher, tensors=tensors)))


def test_padding_behind_the_vocabulary_is_left_out_on_both_sides() -> None:
    """Heads of 7 and 5 rows are compared over 5."""
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, 3, generator=generator) for n in (4, 7))
    long, short = Predictions(states, head), Predictions(states, head[:5])
    cut = long.logprobs(temperature=HOT, num_tokens=5)
    torch.testing.assert_close(cut, short.logprobs(temperature=HOT, num_tokens=5))
    torch.testing.assert_close(cut.exp().sum(-1), torch.ones(4))
    plain = Predictions(states @ head.t())
    assert (plain.num_tokens, long.num_tokens) == (7, 7)
    torch.testing.assert_close(plain.logprobs(temperature=HOT, num_tokens=5), cut)


def test_a_row_with_a_token_that_the_teacher_lacks_is_left_out() -> None:
    run = run_with(policy64())
    (row,) = GROUPS[0].samples[0].sequences
    strange = row.model_copy(update={"tokens": (*row.tokens[:-1], run.teacher.num_tokens)})
    sample = GROUPS[0].samples[0].model_copy(update={"sequences": (row, strange)})
    found = compared_rows((replace(GROUPS[0], samples=(sample,), rewards=(1.0,)),), run)
    assert [one.student.sequence for one in found] == [row]


OTHER = ModelRef(kind="scratch", name="qwen3-tiny", seed=4)
TEACHER = TeacherRef(name="old@last", model=OTHER)


def asked(teacher: TeacherRef | None = TEACHER, **advanced: Any) -> Any:
    distilled = job(algorithm="distill", teacher="old@last", micro_batch_tokens=32, **advanced)
    return replace(distilled, teacher=teacher)


async def trained(engine: Engine, run: Any, steps: int = 3) -> list[Any]:
    results = [await engine.learner.initialize(run)]
    for step in range(1, steps + 1):
        results.append(await engine.learner.step(run, play(step), export_state=True))
    return results


@pytest.mark.parametrize("tuning", ["lora", "full"])
async def test_a_run_resumed_at_any_step_ends_in_the_same_bits(
    engine: Engine, shelf: Shelf, tuning: str
) -> None:
    run = asked(tuning=tuning, distill_beta=0.4)
    whole = await trained(engine, run)
    assert whole[1].state.weights_sha256 != whole[0].state.weights_sha256
    assert {len(one.versions["teacher"]) for one in whole} == {64}
    for start in range(3):
        other = Engine(fetch=shelf.fetch, threads=1)
        try:
            await other.learner.load(run, whole[start].state)
            for step in range(start + 1, 4):
                result = await other.learner.step(run, play(step), export_state=True)
            assert result.state.weights_sha256 == whole[-1].state.weights_sha256
            assert result.state.state_sha256 == whole[-1].state.state_sha256
        finally:
            await other.aclose()


async def test_an_adapter_on_the_run_s_own_base_teaches_what_its_merged_model_teaches(
    engine: Engine, shelf: Shelf
) -> None:
    """The base is loaded once. Merging rounds, so the losses agree to 1e-4."""
    taught = job(run="teacher", lr_schedule="constant")
    results = [await engine.learner.initialize(taught)]
    for step in range(1, 4):
        results.append(await engine.learner.step(taught, play(step), export_state=True))
    weights = shelf.put(weights_of(results[-1].state))
    adapter = TeacherRef(name="t@3", model=TINY, weights=weights, lora_alpha=8.0)
    files = {name: shelf.put(content) for name, content in results[0].files.items()}
    merged = ModelRef(
        kind="checkpoint", name="t@3", files={**files, results[0].weights_name: weights}
    )
    losses = []
    for teacher in (adapter, TeacherRef(name="t@3", model=merged)):
        run = asked(teacher)
        await engine.learner.initialize(run)
        result = await engine.learner.step(run, play(1), export_state=False)
        losses.append(result.metrics["train/loss"])
    assert losses[0] > 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5)


async def test_a_teacher_with_another_vocabulary_is_refused_by_name(engine: Engine) -> None:
    wide = TeacherRef(name="wide", model=ModelRef(kind="scratch", name="qwen3-2m", seed=0))
    with pytest.raises(Refused, match=r"advanced\.teacher 'wide' has another vocabulary"):
        await engine.learner.initialize(asked(wide))


async def test_a_teacher_that_was_changed_is_refused(engine: Engine) -> None:
    run = asked()
    await engine.learner.initialize(run)
    changed = replace(run, teacher=TEACHER.model_copy(update={"model": TINY}))
    with pytest.raises(
        Refused, match=r"advanced\.teacher 'old@last' was changed since the run began"
    ):
        await engine.learner.step(changed, play(1), export_state=False)


async def test_the_weights_of_a_directory_are_part_of_the_teacher_s_hash(
    engine: Engine, tmp_path: Any
) -> None:
    hashes = []
    for seed in (1, 2):
        ref = ModelRef(kind="scratch", name="qwen3-tiny", seed=seed)
        loaded = await engine.learner._cache.load_model(ref)
        loaded.base.model.save_pretrained(tmp_path)
        loaded.base.tokenizer.save_pretrained(tmp_path)
        own = Engine(fetch=lambda ref: b"", threads=1)
        teacher = TeacherRef(name="d", model=ModelRef(kind="directory", name=str(tmp_path)))
        result = await own.learner.initialize(asked(teacher))
        hashes.append(result.versions["teacher"])
        await own.aclose()
    assert len(set(hashes)) == 2


def test_a_run_is_the_reverse_kl_over_tokens_by_default() -> None:
    policy = policy64()
    base = policy.loaded.base
    chat = Chat(base.tokenizer, base.stop_ids)
    run = run_of(asked(None), None, student=policy, chat=chat, micro_batch_tokens=32)
    assert (run.beta, run.hyperparameters.aggregation) == (1.0, "token_mean")
    assert isinstance(run.teacher, Teacher)
    assert run.teacher.policy is policy


async def test_a_batch_without_actions_changes_nothing(engine: Engine) -> None:
    run = asked()
    first = await engine.learner.initialize(run)
    batch = StepBatch(1, groups=(GradedGroup(0, (), ()),))
    result = await engine.learner.step(run, batch, export_state=False)
    assert result.state.weights_sha256 == first.state.weights_sha256


HINT = "the sum is 12"


ASKED = (Message(role="system", content="add"), Message(role="user", content="5+7?"))


def answered(
    *answers: str,
    hint: str | None = None,
    messages: Any = None,
    prompt: tuple[Message, ...] = ASKED,
) -> GradedGroup:
    """A group of answers to one prompt, with the tokens of the tiny model's template."""
    base = policy64().loaded.base
    chat = Chat(base.tokenizer, base.stop_ids)
    ids = chat.encode(chat.text(prompt, reply_next=True))
    samples = []
    for index, answer in enumerate(answers):
        said = chat.encode(answer)
        row = TokenSequence(
            tokens=(*ids, *said),
            loss_mask=loss_mask(len(ids), len(said)),
            logprobs=(0.0,) * (len(ids) + len(said)),
        )
        told = (*prompt, Message(role="assistant", content=answer))
        samples.append(
            SampleRecord(
                index=index, sequences=(row,), messages=told if messages is None else messages
            )
        )
    return GradedGroup(0, tuple(samples), (None,) * len(samples), hint=hint)


def test_the_teacher_reads_the_hint_behind_the_prompt_and_the_student_does_not() -> None:
    run = run_with(policy64())
    (row,) = compared_rows((answered("12", hint=HINT),), run)
    texts = [run.chat.decode(one.sequence.tokens) for one in (row.student, row.teacher)]
    assert texts[1] == texts[0].replace("5+7?", f"5+7?\n\n{HINT}")
    actions = [
        [t for t, m in zip(one.sequence.tokens, one.sequence.loss_mask, strict=True) if m]
        for one in (row.student, row.teacher)
    ]
    assert actions[0] == actions[1] == run.chat.encode("12")


@pytest.mark.parametrize(
    "shown",
    [
        (Message(role="user", content="1+1?"), Message(role="assistant", content="2")),
        (Message(role="system", content="add"), Message(role="assistant", content="Ask me.")),
    ],
)
def test_a_hint_is_behind_the_last_message_of_the_user_in_a_prompt_with_answers(
    shown: tuple[Message, ...],
) -> None:
    run = run_with(policy64())
    prompt = (*shown, Message(role="user", content="5+7?"))
    (row,) = compared_rows((answered("12", hint=HINT, prompt=prompt),), run)
    texts = [run.chat.decode(one.sequence.tokens) for one in (row.student, row.teacher)]
    assert texts[1] == texts[0].replace("5+7?", f"5+7?\n\n{HINT}")


@pytest.mark.parametrize("is_branch", [False, True])
def test_a_hint_is_placed_in_each_row_with_the_tools_that_its_request_offered(
    is_branch: bool,
) -> None:
    """A sample whose second request offered no tools, or was a conversation of its own."""
    run, tools = run_with(policy64()), (ToolSpec(name="add", description="a sum", parameters="{}"),)
    first = (*ASKED, Message(role="assistant", content="12"))
    other = ASKED if is_branch else first
    second = (*other, Message(role="user", content="1+1?"), Message(role="assistant", content="2"))
    rows = []
    for messages, offered in ((first, tools), (second, ())):
        ids = run.chat.encode(run.chat.text(messages[:-1], reply_next=True, tools=offered))
        said = run.chat.encode(messages[-1].content)
        mask = loss_mask(len(ids), len(said))
        logprobs = (0.0,) * len(mask)
        rows.append(TokenSequence(tokens=(*ids, *said), loss_mask=mask, logprobs=logprobs))
    sample = SampleRecord(
        index=0,
        messages=second,
        branches=(first, second) if is_branch else (),
        sequences=tuple(rows),
        row_tools=(tools, ()),
    )
    group = GradedGroup(0, (sample,), (None,), hint=HINT)
    for row, asked in zip(compared_rows((group,), run), ("5+7?", "1+1?"), strict=True):
        texts = [run.chat.decode(one.sequence.tokens) for one in (row.student, row.teacher)]
        assert texts[1] == texts[0].replace(asked, f"{asked}\n\n{HINT}")
    alone = replace(group, samples=(sample.model_copy(update={"row_tools": ()}),))
    with pytest.raises(Refused, match="cannot be placed"):
        compared_rows((alone,), run)


@pytest.mark.parametrize("tokens", [1, 40, 4096])
def test_each_action_is_compared_with_the_same_action_after_the_hint(tokens: int) -> None:
    """The student is its own teacher, so only the hint makes a difference."""
    policy = policy64()
    groups = (answered("12", "seven", "4", hint=HINT), answered("1234"))
    run = run_with(policy, tokens=tokens)
    metrics, _, _ = taken(policy, run, groups)
    total, count = 0.0, 0
    for row in compared_rows(groups, run):
        with torch.no_grad():
            ours, theirs = (
                (logits_of(policy, one) / HOT).log_softmax(-1) for one in (row.student, row.teacher)
            )
        total += float((ours.exp() * (ours - theirs)).sum())
        count += len(ours)
    assert total > 0
    assert metrics["train/loss"] == pytest.approx(total / count, abs=1e-6)


def test_a_hint_is_refused_where_the_conversation_is_not_the_one_that_was_sampled() -> None:
    changed = (Message(role="user", content="5+8?"), Message(role="assistant", content="12"))
    with pytest.raises(Refused, match="cannot be placed in sample 0 of slot 0"):
        compared_rows((answered("12", hint=HINT, messages=changed),), run_with(policy64()))
    with pytest.raises(Refused, match="cannot be placed"):
        compared_rows((answered("12", hint=HINT, messages=()),), run_with(policy64()))


def test_a_hint_that_is_too_long_for_the_teacher_is_refused() -> None:
    with pytest.raises(Refused, match="'t' has 1024 positions, and reads a sample of 1"):
        compared_rows((answered("12", hint="1" * 1024),), run_with(policy64()))


@pytest.mark.parametrize(
    ("hint", "label", "filled"),
    [("think", None, "think"), ("it is {ground_truth}!", "{12}", "it is {12}!")],
)
def test_a_hint_takes_the_label_of_its_row(hint: str, label: str | None, filled: str) -> None:
    assert fill_hint(hint, label) == filled


def test_a_hint_without_a_label_is_refused() -> None:
    with pytest.raises(Refused, match="a row of the dataset has none"):
        fill_hint("it is {ground_truth}", None)
