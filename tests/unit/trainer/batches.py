"""Graded groups and a policy in float64, shared by the tests of losses."""

from collections.abc import Sequence
from typing import Any

import torch

from schemas.learner import GradedGroup
from schemas.sampling import RewardedTurn, SampleRecord
from schemas.sampling import Sequence as Row
from tests.unit.trainer.support import TINY, job, loss_mask
from trainer import grpo
from trainer.forward.decoder import decoder_of
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import Base, build_base
from trainer.model.scalar_heads import Critic, fresh_critic
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import LoadedModel, Policy, fresh_policy

CPU = torch.device("cpu")


def policy64(**advanced: Any) -> Policy:
    """The tiny model in float64, with gradients on, and with an adapter and a critic that are not
    zero. `advanced` overrides that section of the job."""
    base = build_base(TINY, {}, device=CPU)
    single = LoadedModel(base, decoder_of(base), Fallback(base))
    fresh = fresh_policy(single, job(**advanced))
    base.model.double()
    double = Base(
        base.model, base.tokenizer, dict(base.model.state_dict()), base.stop_ids, base.public_name
    )
    generator = torch.Generator().manual_seed(1)

    def moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: (t + 0.2 * torch.randn(t.shape, generator=generator)).double().requires_grad_()
            for name, t in tensors.items()
        }

    tensors = moved(fresh.tensors)
    critic = Critic(moved(fresh_critic(double).tensors))
    loaded = LoadedModel(double, single.decoder, Fallback(double))
    return Policy(loaded, tensors, fresh.scaling, critic)


def parts_of(rewards: tuple[float | None, ...]) -> dict[str, tuple[float | None, ...]]:
    """The rewards as one part, and another part that differs in each group."""
    other = tuple(None if r is None else (3 * i % 4) / 4 for i, r in enumerate(rewards))
    return {"right": rewards, "short": other}


def group(slot: int, rewards: tuple[float | None, ...], *, empty: int | None = None) -> GradedGroup:
    """A group whose samples share a prompt and differ after it; a sample may have no action."""
    samples = []
    for i in range(len(rewards)):
        prompt = tuple(10 + slot + j for j in range(4))
        reply = tuple(20 + (7 * i + 3 * j + slot) % 60 for j in range(2 + i % 3))
        mask = loss_mask(4 + len(reply), 0) if i == empty else loss_mask(4, len(reply))
        logprobs = (0.0,) * 4 + tuple(-4.0 - 0.1 * j for j in range(len(reply)))
        row = Row(tokens=prompt + reply, loss_mask=mask, logprobs=logprobs)
        samples.append(SampleRecord(index=i, sequences=(row,)))
    return GradedGroup(slot, tuple(samples), rewards, parts_of(rewards))


def rewritten(slot: int, rewards: tuple[float | None, ...]) -> GradedGroup:
    """A group of two turns in which every other sample had its history rewritten, so it has two
    rows."""
    samples = []
    for i in range(len(rewards)):
        first = Row(
            tokens=(30 + slot, 31, 40 + i, 41, 50, 42 + i),
            loss_mask=(0, 0, 1, 1, 0, 1),
            logprobs=(0.0, 0.0, -4.0, -3.5, 0.0, -4.4),
        )
        second = Row(
            tokens=(60 + slot, 61 + i, 62, 63),
            loss_mask=(0, 0, 1, 1),
            logprobs=(0.0, 0.0, -4.1, -3.9),
        )
        turns = (
            RewardedTurn(row=0, num_actions=2, reward=0.3 * i, agent="solver"),
            RewardedTurn(row=0, num_actions=1, reward=None if i else 1.0, agent="critic"),
            RewardedTurn(row=1, num_actions=2, reward=-0.2 * i, agent="solver"),
        )
        rows, num_turns = ((first, second), 3) if i % 2 else ((first,), 2)
        own = {"critic": 0.25 * i}
        samples.append(
            SampleRecord(index=i, sequences=rows, turns=turns[:num_turns], agent_rewards=own)
        )
    return GradedGroup(slot, tuple(samples), rewards, parts_of(rewards))


def reasoned(slot: int, rewards: tuple[float | None, ...]) -> GradedGroup:
    """A group of two turns whose template drops the reasoning of the first, so every sample has two
    rows. All answer the first question with the same 17 tokens. Every third sample does not reason, so
    it learns them in its only row, at logprobs of its own, where others only read them."""
    prompt = (30 + slot, *range(10, 28))
    answer, question = (*range(40, 56), 6), (3, 61, 62, 4)
    samples = []
    for i in range(len(rewards)):
        thought = (90 - i, 80 + i, 70)
        first = (*thought, *answer) if i % 3 else answer
        context = (*prompt, *answer, *question)
        second = (99 - i, 33, 60 + i % 2, 6)
        actions = [(prompt, first, -3.0), (context, second, -4.0)]
        made = [
            Row(
                tokens=before + chosen,
                loss_mask=loss_mask(len(before), len(chosen)),
                logprobs=(0.0,) * len(before)
                + tuple(at - 0.1 * i - 0.01 * j for j in range(len(chosen))),
            )
            for before, chosen, at in actions
        ]
        if not i % 3:
            mask = loss_mask(len(prompt), len(answer)) + loss_mask(len(question), len(second))
            logprobs = made[0].logprobs + (0.0,) * len(question) + made[1].logprobs[-len(second) :]
            made = [Row(tokens=made[1].tokens, loss_mask=mask, logprobs=logprobs)]
        turns = tuple(
            RewardedTurn(
                row=min(n, len(made) - 1),
                num_actions=len(chosen),
                reward=(0.2 * i, None, -0.3)[(i + n) % 3],
                agent=("solver", "critic")[n],
            )
            for n, (_, chosen, _) in enumerate(actions)
        )
        samples.append(
            SampleRecord(
                index=i, sequences=tuple(made), turns=turns, agent_rewards={"critic": 0.25 * i}
            )
        )
    return GradedGroup(slot, tuple(samples), rewards, parts_of(rewards))


def accumulate_grpo(
    policy: Policy, groups: Sequence[GradedGroup], hyperparameters: Hyperparameters
) -> tuple[dict[str, float], tuple[int, ...]]:
    """The gradients of a GRPO step, without the update. Returns metrics and plan."""
    batch = grpo.prepare_batch(
        policy, groups, objective=grpo.OBJECTIVE, hyperparameters=hyperparameters
    )
    return grpo.accumulate_gradients(policy, batch)


GROUPS = (group(0, (1.0, 0.0, 0.5, None)), group(1, (0.0, 1.0, 1.0), empty=2), group(2, (1.0, 1.0)))
MIXED = (*GROUPS, rewritten(3, (0.2, 0.9, -0.4)))
REASONED = (reasoned(0, (0.2, 0.9, -0.4, 0.6)), group(1, (1.0, 0.0)), reasoned(2, (1.0, None, 0.5)))
