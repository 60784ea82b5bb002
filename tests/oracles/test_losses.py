"""Losses and their gradients against TRL, Liger and verl, in float64.

Every comparison goes through the whole of our update: groups, packing, micro-batches, weights. Where
a reference divides by something else, the factor is written out beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings

from schemas.config import LossAggregation
from tests.oracles import theirs_liger, theirs_trl, theirs_verl
from tests.oracles.cases import Answer, Case, cases, ours, same, times
from trainer import grpo
from trainer.losses import cispo, dr_grpo, gspo, rloo
from trainer.objective import Objective, Outcome
from trainer.objectives import OBJECTIVES
from trainer.settings import Settings

LONGEST = 7


def advantage_of(case: Case, objective: Objective) -> torch.Tensor:
    """Our advantages (B), for references that take them: they have tests of their own."""
    rewards = [
        reward if known else None for reward, known in zip(case.rewards, case.known, strict=True)
    ]
    outcome = Outcome(case.group, rewards, torch.arange(case.num_rows))
    return objective.estimate(outcome, objective.defaults).advantage_E


def settings_for(name: str, **changes: object) -> tuple[Objective, Settings]:
    objective = OBJECTIVES[name]  # type: ignore[index]
    return objective, replace(objective.defaults, max_response_length=LONGEST, **changes)  # type: ignore[arg-type]


def clips(settings: Settings) -> dict[str, float]:
    return {"clip_ratio_low": settings.clip_low, "clip_ratio_high": settings.clip_high}


def epsilons(settings: Settings) -> dict[str, float]:
    return {"epsilon_low": settings.clip_low, "epsilon_high": settings.clip_high}


def off_the_edge(case: Case, low: float, high: float) -> None:
    """A mean over a row is summed in another order by each: keep away from where it is clipped."""
    count = case.mask.sum(-1).clamp(min=1)
    ratio = (((case.now - case.behaviour) * case.mask).sum(-1) / count).exp()
    assume(all(bool(((ratio - edge).abs() > 1e-9).all()) for edge in (1 - low, 1 + high)))


@dataclass(frozen=True)
class Reference:
    """How a reference is asked for an aggregation, and what its answer is multiplied by."""

    trl: str
    factor: Callable[[Case], float]


AGGREGATIONS: dict[LossAggregation, Reference] = {
    "sequence_mean": Reference("grpo", lambda case: case.counted),
    "token_mean": Reference("dapo", lambda case: 1.0),
    "constant": Reference("dr_grpo", lambda case: case.counted),
}


def references(
    case: Case, advantage: torch.Tensor, settings: Settings, *, verl: str = "vanilla"
) -> dict[str, Answer]:
    """The clipped surrogate of these settings by all three."""
    asked = AGGREGATIONS[settings.aggregation]
    level = {"importance_sampling_level": "sequence" if verl == "gspo" else "token"}
    options = {"loss_type": asked.trl, "max_completion_length": LONGEST, **level}
    factor, delta = asked.factor(case), settings.clip_delta
    trl = theirs_trl.loss(case, advantage, **options, **epsilons(settings), delta=delta)
    liger = theirs_liger.loss(case, advantage, **options, **epsilons(settings), delta=delta)
    found = {"trl": times(trl, factor), "liger": times(liger, factor)}
    if verl != "gspo" or delta is None:
        dual = {} if delta is None else {"clip_ratio_c": delta}
        found["verl"] = theirs_verl.policy_loss(
            case,
            verl,
            advantage,
            aggregation=settings.aggregation,
            longest=LONGEST,
            **clips(settings),
            **dual,
        )
    return found


def agree(mine: Answer, theirs: dict[str, Answer]) -> None:
    for found in theirs.values():
        same(mine, found)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo"])
@settings(max_examples=25)
@given(case=cases())
def test_clipped_surrogates(name: str, aggregation: LossAggregation, case: Case) -> None:
    objective, chosen = settings_for(name, aggregation=aggregation)
    advantage = advantage_of(case, objective)
    agree(ours(case, objective, chosen), references(case, advantage, chosen))


@settings(max_examples=50)
@given(case=cases())
def test_grpo_from_the_reward_on_is_trl_s_but_for_its_eps(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "EPS", 1e-4)
        mine = ours(case, grpo.OBJECTIVE, grpo.OBJECTIVE.defaults)
    same(mine, times(theirs_trl.loss(case), case.counted))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=50)
@given(case=cases())
def test_gspo(aggregation: LossAggregation, case: Case) -> None:
    objective, chosen = settings_for("gspo", aggregation=aggregation)
    off_the_edge(case, chosen.clip_low, chosen.clip_high)
    advantage = advantage_of(case, objective)
    agree(ours(case, objective, chosen), references(case, advantage, chosen, verl="gspo"))


@settings(max_examples=50)
@given(case=cases())
def test_gspo_with_a_wide_clip(case: Case) -> None:
    objective, chosen = settings_for("gspo", clip_low=0.2, clip_high=0.2)
    off_the_edge(case, 0.2, 0.2)
    advantage = advantage_of(case, gspo.OBJECTIVE)
    agree(ours(case, objective, chosen), references(case, advantage, chosen, verl="gspo"))


@settings(max_examples=50)
@given(case=cases())
def test_cispo(case: Case) -> None:
    objective, chosen = settings_for("cispo")
    advantage = advantage_of(case, objective)
    bound = {"loss_type": "cispo", "epsilon_high": 1 + chosen.clip_high}
    mine = ours(case, objective, chosen)
    same(mine, theirs_trl.loss(case, advantage, **bound))
    same(mine, theirs_liger.loss(case, advantage, **bound))
    from_above = {"clip_ratio_low": 1.0, "clip_ratio_high": chosen.clip_high}
    same(mine, theirs_verl.policy_loss(case, "cispo", advantage, **from_above))


def test_cispo_is_not_bounded_from_below_where_verl_is() -> None:
    one = torch.ones(2, 1, dtype=torch.float64)
    case = Case(2, (0.0, 1.0), one, -3 * one, -one, -one, -one)
    advantage = advantage_of(case, cispo.OBJECTIVE)
    mine = ours(case, cispo.OBJECTIVE, cispo.OBJECTIVE.defaults)
    both = {"clip_ratio_low": 0.2, "clip_ratio_high": 4.0}
    theirs = theirs_verl.policy_loss(case, "cispo", advantage, **both)
    assert (mine.gradient - theirs.gradient).abs().max() > 0.1


@settings(max_examples=50)
@given(case=cases())
def test_importance_sampling(case: Case) -> None:
    objective, chosen = settings_for("importance_sampling")
    advantage = advantage_of(case, dr_grpo.OBJECTIVE)
    unclipped = {"epsilon_low": 1.0, "epsilon_high": 1e9, "loss_type": "dr_grpo"}
    options = {**unclipped, "max_completion_length": LONGEST}
    mine = ours(case, objective, chosen)
    same(mine, times(theirs_trl.loss(case, advantage, **options), case.counted))
    same(mine, times(theirs_liger.loss(case, advantage, **options), case.counted))
    ratio = (case.now - case.behaviour).exp()
    theirs = times(theirs_verl.reinforce_loss(case, advantage, ratio), 1 / LONGEST)
    torch.testing.assert_close(mine.gradient, theirs.gradient, atol=1e-9, rtol=1e-12)


@pytest.mark.parametrize("delta", [1.5, 4.0])
@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo"])
@settings(max_examples=25)
@given(case=cases())
def test_two_sided_clipping(name: str, delta: float, case: Case) -> None:
    objective, chosen = settings_for(name, clip_delta=delta)
    advantage = advantage_of(case, objective)
    agree(ours(case, objective, chosen), references(case, advantage, chosen))


@settings(max_examples=25)
@given(case=cases())
def test_two_sided_clipping_of_sequences(case: Case) -> None:
    objective, chosen = settings_for("gspo", clip_delta=1.5)
    off_the_edge(case, 3e-4, 4e-4)
    off_the_edge(case, 3e-4, 0.5)
    advantage = advantage_of(case, objective)
    agree(ours(case, objective, chosen), references(case, advantage, chosen, verl="gspo"))


@pytest.mark.parametrize("threshold", [0.05, 0.5])
@settings(max_examples=50)
@given(case=cases())
def test_the_off_policy_sequence_mask(threshold: float, case: Case) -> None:
    count = case.mask.sum(-1).clamp(min=1)
    distance = ((case.behaviour - case.now) * case.mask).sum(-1) / count
    assume(bool(((distance - threshold).abs() > 1e-9).all()))
    chosen = replace(rloo.OBJECTIVE.defaults, off_policy_threshold=threshold)
    chosen = replace(chosen, aggregation="token_mean")
    advantage = advantage_of(case, rloo.OBJECTIVE)
    mine = ours(case, rloo.OBJECTIVE, chosen)
    theirs = theirs_trl.loss(case, advantage, loss_type="dapo", off_policy_mask_threshold=threshold)
    same(mine, theirs)
    kept = (advantage >= 0) | (distance <= threshold)
    by_hand = theirs_verl.policy_loss(
        case, "vanilla", advantage, weights=kept.double()[:, None].expand_as(case.mask)
    )
    same(mine, by_hand)


@settings(max_examples=50)
@given(case=cases())
def test_the_kl_term_in_the_loss(case: Case) -> None:
    objective, chosen = settings_for("dapo", kl_coef=0.3)
    advantage = advantage_of(case, objective)
    options = {"loss_type": "dapo", "beta": 0.3, **epsilons(chosen)}
    mine = ours(case, objective, chosen)
    same(mine, theirs_trl.loss(case, advantage, **options))
    same(mine, theirs_liger.loss(case, advantage, **options))


@settings(max_examples=25)
@given(case=cases())
def test_liger_fused_from_hidden_states(case: Case) -> None:
    """The same numbers as logits: what is rounded to fp32 within agrees to 1e-6 of its size."""
    generator = torch.Generator().manual_seed(case.num_rows)
    rows, width = case.mask.shape
    hidden = torch.randn(rows, width, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (rows, width), generator=generator)
    logprobs = (hidden @ head.t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    offset = torch.rand(rows, width, generator=generator, dtype=torch.float64) * 0.3 - 0.15
    near = replace(case, now=logprobs, behaviour=logprobs - offset)
    objective, chosen = settings_for("dapo")
    advantage = advantage_of(near, objective)
    mine = ours(near, objective, chosen)
    leaf = hidden.clone().requires_grad_()
    theirs = theirs_liger.fused(
        leaf, head, targets, near.mask, advantage, near.behaviour, **epsilons(chosen)
    )
    theirs.backward()
    again = hidden.clone().requires_grad_()
    found = (again @ head.t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    found.backward(mine.gradient)
    scale = 1 + advantage.abs().max()
    assert abs(float(theirs.detach()) - mine.loss) <= 1e-6 * scale
    torch.testing.assert_close(leaf.grad, again.grad, atol=1e-6 * float(scale), rtol=1e-5)
