"""Preferences as numbers that our step and the oracles can read: float64, A answers of at most T tokens.

The answers of a pair are neighbours, the chosen one first. `now` are the log-probabilities that are
trained, `reference` those of the reference, and `other_now` and `other_reference` those of answers to
other prompts, which only KTO reads. TRL's trainers are called unbound on a stand-in whose models answer
with these numbers. Liger's losses are functions of the sums.
"""

import types
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from schemas.config import Advanced
from schemas.learner import GradedGroup
from schemas.sampling import SampleRecord
from schemas.sampling import Sequence as Row
from tests.oracles.available import oracle
from tests.unit.trainer.support import loss_mask
from trainer.forward.packing import Example, MicroBatch
from trainer.objective.metrics import Means
from trainer.preferences.batch import PreferenceBatch, PreferenceUnit, micro_batches
from trainer.preferences.online_dpo import pairs_of
from trainer.preferences.registry import PREFERENCE_OBJECTIVES, settings_of
from trainer.preferences.step import PreferenceRun, measure_baseline, micro_batch_loss

DPO = oracle("trl.trainer.dpo_trainer").DPOTrainer
REWARD = oracle("trl.trainer.reward_trainer").RewardTrainer
KTO = oracle("trl.trainer.kto_trainer").KTOTrainer
ORPO = oracle("trl.experimental.orpo.orpo_trainer").ORPOTrainer
ONLINE_DPO = oracle("trl.experimental.online_dpo.online_dpo_trainer").OnlineDPOTrainer
CPO = oracle("trl.experimental.cpo.cpo_trainer").CPOTrainer
LIGER = {
    name: getattr(
        oracle(f"liger_kernel.chunked_loss.{name}_loss"), f"LigerFusedLinear{label}Function"
    ).preference_loss_fn
    for name, label in (("dpo", "DPO"), ("kto", "KTO"), ("orpo", "ORPO"), ("simpo", "SimPO"))
}

Solution = tuple[float, torch.Tensor]
"""A loss, and its gradient (A, T) with respect to `now`."""


@dataclass(frozen=True, eq=False)
class PairCase:
    """`lengths` are the tokens of each answer. Beyond them the tables are not read. A reward model's
    score of an answer is `now` at its last token, and `margins` are those of the pairs."""

    lengths: tuple[int, ...]
    now: torch.Tensor
    reference: torch.Tensor
    other_now: torch.Tensor
    other_reference: torch.Tensor
    micro_batch_tokens: int = 4096
    margins: tuple[float, ...] = ()

    @property
    def mask(self) -> torch.Tensor:
        """(A, T): 1 where an answer has a token."""
        places = torch.arange(self.now.shape[1])
        return (places < torch.tensor(self.lengths)[:, None]).double()

    @property
    def is_chosen(self) -> tuple[bool, ...]:
        return (True, False) * (len(self.lengths) // 2)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of each answer, if the answers are samples: by turns the first or the second is better."""
        return (0.0, 0.5, 1.0, 0.5) * (len(self.lengths) // 4) + (0.0, 0.5)[: len(self.lengths) % 4]


@st.composite
def pair_cases(draw: st.DrawFn) -> PairCase:
    """Pairs of answers whose log-ratios are small, large, or equal."""
    pairs, longest = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    answers = 2 * pairs
    lengths = tuple(draw(st.integers(1, longest)) for _ in range(answers))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from((0.0, 0.01, 1.0, 30.0)))

    def table() -> torch.Tensor:
        return -0.01 - 3 * torch.rand(answers, longest, generator=generator, dtype=torch.float64)

    def near(other: torch.Tensor) -> torch.Tensor:
        moved = torch.randn(other.shape, generator=generator, dtype=torch.float64)
        return (other + scale * moved).clamp(max=-1e-3)

    now, other = table(), table()
    tokens = draw(st.sampled_from((1, 12, 4096)))
    margins = tuple(draw(st.sampled_from((0.0, 0.5, 3.0))) for _ in range(pairs))
    return PairCase(lengths, now, near(now), other, near(other), tokens, margins)


class TablePolicy:
    """A policy whose log-probabilities are looked up: the token of answer a, position t is a T + t, and
    those of the other answers come after them."""

    shares_prompts = shares_prefixes = True
    device = torch.device("cpu")

    def __init__(self, case: PairCase) -> None:
        self.leaf = case.now.clone().requires_grad_()
        self._now = torch.cat([self.leaf, case.other_now])
        self._reference = torch.cat([case.reference, case.other_reference])

    def logprobs(
        self, micro: MicroBatch, *, temperature: float, reference: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert temperature == 1.0
        table = self._reference if reference else self._now
        found_M = table.flatten()[micro.target_M]
        return found_M, torch.zeros_like(found_M.detach())

    def scores(self, micro: MicroBatch) -> torch.Tensor:
        return self._now.flatten()[micro.tokens_N[micro.last_R]]


def _row(case: PairCase, answer: int) -> Row:
    longest, length = case.now.shape[1], case.lengths[answer % len(case.lengths)]
    return Row(
        tokens=(0, *(answer * longest + t for t in range(length))),
        loss_mask=loss_mask(1, length),
        logprobs=(0.0,) * (length + 1),
    )


def _unit(case: PairCase, answers: tuple[int, ...], is_chosen: tuple[bool, ...]) -> PreferenceUnit:
    examples = tuple(Example(answer, _row(case, answer)) for answer in answers)
    margin = case.margins[answers[0] // 2] if len(answers) == 2 and case.margins else 0.0
    return PreferenceUnit(examples, is_chosen, margin)


def _sampled_batch(case: PairCase) -> PreferenceBatch:
    """Groups of two samples, as online DPO pairs them."""
    groups = [
        GradedGroup(
            first // 2,
            tuple(SampleRecord(index=i, sequences=(_row(case, first + i),)) for i in range(2)),
            case.rewards[first : first + 2],
        )
        for first in range(0, len(case.lengths), 2)
    ]
    return pairs_of(groups)


def ours(case: PairCase, **advanced: Any) -> Solution:
    """Our step's loss, over micro-batches as the case says."""
    chosen = Advanced(**advanced)
    objective = PREFERENCE_OBJECTIVES[chosen.algorithm]
    nothing: Any = None
    run = PreferenceRun(objective, settings_of(chosen), nothing, 99, case.micro_batch_tokens)
    answers = len(case.lengths)
    units = tuple(_unit(case, (a, a + 1), (True, False)) for a in range(0, answers, 2))
    others = tuple(_unit(case, (a,), (False,)) for a in range(answers, 2 * answers))
    batch = PreferenceBatch(
        units,
        others if objective.has_baseline else (),
        num_losses=len(units) if objective.is_paired else answers,
        num_rows=len(units),
        num_cut=0,
        num_lost=0,
    )
    if objective.from_groups:
        batch = _sampled_batch(case)
    policy: Any = TablePolicy(case)
    baseline, means = measure_baseline(policy, batch, run), Means()
    for micro in micro_batches(policy, batch.units, micro_batch_tokens=case.micro_batch_tokens):
        micro_batch_loss(policy, micro, batch, run, baseline=baseline, means=means).backward()
    return means.values()["train/loss"], policy.leaf.grad


class _Model(torch.nn.Module):
    """Answers with a table (A, T), and with another for rows whose first token is 1."""

    is_gradient_checkpointing = False

    def __init__(self, table: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__()
        self._tables = (table, other)

    def forward(self, *, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> Any:
        table = self._tables[int(input_ids[0, 0])] * (labels[:, 1:] != -100)
        zero = torch.zeros_like(table.detach())
        return types.SimpleNamespace(
            log_probs=table, entropy=zero, mean_logits=zero, is_top1=zero.bool()
        )


class _Accelerator:
    device = torch.device("cpu")

    def backward(self, loss: torch.Tensor, **_: object) -> None:
        loss.backward()

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    gather_for_metrics = gather


class _Trainer:
    """The attributes of a trainer that the losses read."""

    aux_loss_enabled = precompute_ref_logps = use_weighting = False
    ld_alpha = None
    f_divergence_type = "reverse_kl"
    calculate_KL = True  # noqa: N815 - TRL's name
    loss_weights = (1.0,)
    alpha, label_smoothing, simpo_gamma = 0.0, 0.0, 0.5
    desirable_weight = undesirable_weight = 1.0
    _total_train_tokens, _tp_size = 0, 1
    _compute_kl_logps = KTO._compute_kl_logps

    def __init__(self, **settings: Any) -> None:
        self.accelerator = _Accelerator()
        self.args = types.SimpleNamespace(gradient_checkpointing_kwargs=None)
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        for name, value in settings.items():
            setattr(self, name, value)


def _solved(case: PairCase, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Solution:
    leaf = case.now.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad * case.mask


def trl_dpo(case: PairCase, **settings: Any) -> Solution:
    """TRL's batch has all chosen answers first."""
    order = torch.cat(
        [torch.arange(0, len(case.lengths), 2), torch.arange(1, len(case.lengths), 2)]
    )
    mask = case.mask[order]
    ids = torch.zeros(len(order), mask.shape[1] + 1, dtype=torch.long)
    first = torch.zeros(len(order), 1)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": torch.cat([first, mask], dim=1).long(),
    }

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        model = _Model(now[order], now[order])
        trainer = _Trainer(**settings)
        reference = _Model(case.reference[order], case.reference)
        vars(trainer).update(model=model, ref_model=reference)
        value: torch.Tensor = DPO._compute_loss(trainer, model, inputs, False)
        return value

    return _solved(case, loss_of)


def trl_online_dpo(case: PairCase, **settings: Any) -> Solution:
    """A whole training step of TRL, which samples two answers for each prompt: the first ones, then the
    second ones. Generation, scoring and rewards are given."""
    order = torch.cat(
        [torch.arange(0, len(case.lengths), 2), torch.arange(1, len(case.lengths), 2)]
    )
    prompts = ["?"] * (len(order) // 2)
    mask, none = case.mask[order], torch.zeros(len(order), 0, dtype=torch.long)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    policy, leaf = torch.nn.Module(), case.now.clone().requires_grad_()

    class Trainer(_Trainer):
        def _generate(self, *_: object) -> tuple[object, ...]:
            return none, none, ids, mask, None

        def _forward(self, model: object, *_: object) -> torch.Tensor:
            return (leaf if model is policy else case.reference)[order]

        def _calculate_rewards_from_functions(self, *_: object, **__: object) -> torch.Tensor:
            return torch.tensor(case.rewards, dtype=torch.float64)[order]

    options: dict[str, Any] = {
        "missing_eos_penalty": None,
        "loss_type": "sigmoid",
        "use_vllm": False,
    }
    options |= {"torch_empty_cache_steps": None, "optim": "adamw_torch", "n_gpu": 1}
    trainer = Trainer(
        args=types.SimpleNamespace(**options, gradient_accumulation_steps=1),
        ref_model=torch.nn.Module(),
        eos_token_ids=[0],
        reward_funcs=[None],
        stats=defaultdict(list),
        state=types.SimpleNamespace(global_step=1),
        processing_class=types.SimpleNamespace(batch_decode=lambda *_, **__: [""] * len(order)),
        **settings,
    )
    loss = ONLINE_DPO.training_step(trainer, policy, {"prompt": prompts})
    assert leaf.grad is not None
    return float(loss), leaf.grad * case.mask


def trl_reward(case: PairCase, *, center: float | None) -> Solution:
    """TRL's batch has all chosen answers first. The model answers with the scores."""
    last = torch.tensor(case.lengths) - 1
    answers = torch.arange(len(case.lengths))
    inputs = {
        "input_ids": torch.zeros(len(case.lengths), 1, dtype=torch.long),
        "attention_mask": torch.ones(len(case.lengths), 1, dtype=torch.long),
        "margin": torch.tensor(case.margins, dtype=torch.float64),
    }

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        scores = now[answers, last]
        logits = torch.cat([scores[0::2], scores[1::2]])[:, None]
        model: Any = mock.Mock(training=True, return_value=types.SimpleNamespace(logits=logits))
        trainer = _Trainer(model=model)
        trainer.args.center_rewards_coefficient = center
        value: torch.Tensor = REWARD.compute_loss(trainer, model, inputs)
        return value

    return _solved(case, loss_of)


def trl_kto(case: PairCase, **settings: Any) -> Solution:
    ids = torch.zeros(len(case.lengths), case.mask.shape[1] + 1, dtype=torch.long)
    mask = torch.cat([torch.zeros(len(case.lengths), 1), case.mask], dim=1).long()
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask,
        "KL_input_ids": ids + 1,
        "KL_attention_mask": torch.ones_like(ids),
        "KL_completion_mask": mask,
        "label": torch.tensor(case.is_chosen),
    }

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        model = _Model(now, case.other_now)
        trainer = _Trainer(loss_type="kto", **settings)
        reference = _Model(case.reference, case.other_reference)
        vars(trainer).update(model=model, ref_model=reference)
        value: torch.Tensor = KTO._compute_loss(trainer, model, inputs, False)
        return value

    return _solved(case, loss_of)


def _sums(case: PairCase, now: torch.Tensor, *, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums or means of the chosen and of the rejected answers' log-probabilities."""
    total = (now * case.mask).sum(1)
    total = total / torch.tensor(case.lengths) if mean else total
    return total[0::2], total[1::2]


def _nll(case: PairCase, now: torch.Tensor) -> torch.Tensor:
    """The first term of ORPO by hand, which peers take over the tokens of a batch and its prompts."""
    return -_sums(case, now, mean=True)[0].mean()


def trl_orpo(case: PairCase, **settings: Any) -> Solution:
    def loss_of(now: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            found = ORPO.odds_ratio_loss(_Trainer(**settings), *_sums(case, now, mean=True))
        return _nll(case, now) - found[0].mean()

    return _solved(case, loss_of)


def trl_cpo(case: PairCase, *, mean: bool, **settings: Any) -> Solution:
    """TRL's CPO loss, of the log-probabilities or, for cDPO, of the log-ratios."""

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        table = now if mean else now - case.reference
        value: torch.Tensor = CPO.cpo_loss(_Trainer(**settings), *_sums(case, table, mean=mean))[0]
        return value.mean()

    return _solved(case, loss_of)


def liger(case: PairCase, name: str, **settings: Any) -> Solution:
    target = torch.zeros(len(case.lengths), 1)

    def loss_of(now: torch.Tensor) -> torch.Tensor:
        if name == "kto":
            ratio = ((now - case.reference) * case.mask).sum(1)
            other = ((case.other_now - case.other_reference) * case.mask).sum(1)
            kl = other.mean().clamp(min=0)
            return LIGER[name](ratio, torch.tensor(case.is_chosen), target, kl=kl, **settings)[0]
        sums = _sums(case, now, mean=name != "dpo")
        if name == "dpo":
            settings["ref_chosen_logps"], settings["ref_rejected_logps"] = _sums(
                case, case.reference, mean=False
            )
        value: torch.Tensor = LIGER[name](*sums, target, **settings)[0]
        return value + _nll(case, now) if name == "orpo" else value

    return _solved(case, loss_of)


Solutions = tuple[Solution, dict[str, Solution]]


def dpo(loss: str, **settings: Any) -> Callable[[PairCase], Solutions]:
    def compare(case: PairCase) -> Solutions:
        mine = ours(case, algorithm="dpo", preference_loss=loss, beta=0.3)
        theirs = {"TRL": trl_dpo(case, beta=0.3, loss_types=[loss])}
        if loss in ("sigmoid", "hinge"):
            theirs["Liger"] = liger(case, "dpo", beta=0.3, loss_type=loss)
        return mine, theirs

    return compare


def smoothed_dpo(case: PairCase) -> Solutions:
    given: dict[str, Any] = {"beta": 0.3, "label_smoothing": 0.1}
    return ours(case, algorithm="dpo", **given), {
        "TRL": trl_cpo(case, mean=False, loss_type="sigmoid", **given)
    }


def online_dpo(case: PairCase) -> Solutions:
    given: dict[str, Any] = {"beta": 0.3}
    return ours(case, algorithm="online_dpo", **given), {"TRL": trl_online_dpo(case, **given)}


def kto(case: PairCase) -> Solutions:
    return ours(case, algorithm="kto", beta=0.3), {
        "TRL": trl_kto(case, beta=0.3),
        "Liger": liger(case, "kto", beta=0.3),
    }


def weighted_kto(case: PairCase) -> Solutions:
    given: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    return ours(case, algorithm="kto", **given), {"TRL": trl_kto(case, **given)}


def orpo(case: PairCase) -> Solutions:
    return ours(case, algorithm="orpo", beta=0.3), {
        "TRL": trl_orpo(case, beta=0.3),
        "Liger": liger(case, "orpo", beta=0.3),
    }


def simpo(case: PairCase) -> Solutions:
    given: dict[str, Any] = {"beta": 2.5, "simpo_gamma": 1.2}
    return ours(case, algorithm="simpo", **given), {
        "TRL": trl_cpo(case, mean=True, loss_type="simpo", **given),
        "Liger": liger(case, "simpo", beta=2.5, gamma=1.2),
    }


def reward_model(center: float | None) -> Callable[[PairCase], Solutions]:
    def compare(case: PairCase) -> Solutions:
        mine = ours(case, algorithm="reward_model", center_rewards_coefficient=center)
        return mine, {"TRL": trl_reward(case, center=center)}

    return compare


PREFERENCE_COMPARISONS: dict[str, Callable[[PairCase], Solutions]] = {
    **{f"dpo, {loss}": dpo(loss) for loss in ("sigmoid", "sigmoid_norm", "ipo", "hinge")},
    "dpo, label smoothing": smoothed_dpo,
    "online_dpo": online_dpo,
    "kto": kto,
    "kto, weights": weighted_kto,
    "orpo": orpo,
    "simpo": simpo,
    "reward_model": reward_model(None),
    "reward_model, centred": reward_model(0.3),
}


def gap(mine: Solution, theirs: Solution) -> float:
    """The largest difference of value and gradient, over 1 + the size of each."""
    value = abs(mine[0] - theirs[0]) / (1 + abs(theirs[0]))
    slopes = (mine[1] - theirs[1]).abs() / (1 + theirs[1].abs())
    return max(value, float(slopes.max()))
