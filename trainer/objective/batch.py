# ruff: noqa: N815  shape suffixes name the axes of a tensor, in class scope too
"""A batch that is ready to train: its training rows, and the constants of each action.

The constants are computed before the first update and stay the same for all updates of the step.
A *mini-batch* is the part of a step that one optimizer update learns from, and a *micro-batch* is what
one pass computes. Micro-batches are packed again for each pass over the batch, so that memory grows with
a micro-batch and not with the batch. The micro-batch plan depends on the rows alone.

Mini-batches consist of whole groups in the order of their slots. The slots of a step hold rows of the
dataset in an order that the run's seed has shuffled, so they are not shuffled again. Where groups are
missing, for example because they were filtered, there are only as many mini-batches as the groups that
are left need, and these are distributed evenly. So no update follows from a small remainder.

The shape suffixes E, M and S are explained in `trainer/objective/objective.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from schemas.learner import GradedGroup, requested_rows
from trainer.forward.packing import Example, MicroBatch, pack
from trainer.grammar.token_masks import masks_of
from trainer.objective.attestation import Witness
from trainer.objective.covariance import MeasuredActions
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.kl import kl_to_reference
from trainer.objective.objective import ActionValues, Objective
from trainer.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBatch:
    """A batch with its advantages and weights. It can be trained any number of times. `minibatches` are
    its training rows. `values_E` holds a tensor of shape (E) for each constant. The gradient of the loss
    is 0 at every action of the `idle` samples, so their passes have no backward pass. A `witness` sees
    the logprobs of the first update."""

    objective: Objective
    hyperparameters: Hyperparameters
    minibatches: tuple[tuple[Example, ...], ...]
    values_E: ActionValues
    idle: frozenset[int] = frozenset()
    witness: Witness | None = None

    def split(self) -> tuple["PreparedBatch", ...]:
        """The mini-batches as batches of their own, in order."""
        sizes = [sum(row.num_actions for row in rows) for rows in self.minibatches]
        parts = {name: value_E.split(sizes) for name, value_E in self.values_E.items()}
        return tuple(
            replace(self, minibatches=(rows,), values_E={name: of[n] for name, of in parts.items()})
            for n, rows in enumerate(self.minibatches)
        )

    def micro_batches(self, policy: Policy) -> Iterator[tuple[MicroBatch, ActionValues]]:
        """The micro-batches, each with its part (M) of the values: first those with a gradient, then
        those of idle samples, both in canonical order."""
        first = 0
        for rows in self.minibatches:
            ends = accumulate((row.num_actions for row in rows), initial=first)
            actions = [torch.arange(*pair) for pair in pairwise(ends)]
            for is_idle in (False, True):
                chosen = [n for n, row in enumerate(rows) if (row.sample in self.idle) == is_idle]
                place_E = torch.cat([torch.arange(0), *(actions[n] for n in chosen)])
                of_part = [tuple(rows[n] for n in chosen)]
                for micro in _micro_batches(policy, of_part, self.hyperparameters):
                    place_M, place_E = place_E.tensor_split([len(micro.sample_M)])
                    values = {name: value_E[place_M] for name, value_E in self.values_E.items()}
                    yield replace(micro, has_gradient=not is_idle), values
            first += sum(row.num_actions for row in rows)


def examples_of(groups: Sequence[GradedGroup]) -> tuple[Example, ...]:
    """The training rows of all samples, in canonical order. Samples are numbered across groups."""
    samples = [sample for group in groups for sample in group.samples]
    return tuple(Example(i, row) for i, sample in enumerate(samples) for row in sample.sequences)


def with_masks(examples: Sequence[Example], policy: Policy) -> tuple[Example, ...]:
    """The examples with the token masks of the answers that were sampled under a grammar. Raises
    CorruptData unless these are the masks that they were sampled under."""
    seen: dict[bytes, bytes] = {}
    return tuple(
        replace(e, masks=masks_of(e.sequence, policy.loaded.base, seen))
        if e.sequence.constrained
        else e
        for e in examples
    )


def minibatches_of(
    groups: Sequence[GradedGroup], examples: Sequence[Example], *, most: int | None
) -> tuple[tuple[Example, ...], ...]:
    """The training rows of each mini-batch, in canonical order. A mini-batch has at most `most` groups,
    and no two of them differ by more than one group. Groups without an action are not counted. There is
    always at least one mini-batch."""
    group_S = [n for n, group in enumerate(groups) for _ in group.samples]
    rows: dict[int, list[Example]] = {}
    for example in examples:
        if example.num_actions:
            rows.setdefault(group_S[example.sample], []).append(example)
    if most is None or len(rows) <= most:
        return (tuple(examples),)
    by_group, number = list(rows.values()), -(-len(rows) // most)
    ends = [n * len(by_group) // number for n in range(number + 1)]
    return tuple(
        tuple(row for group in by_group[first:end] for row in group)
        for first, end in pairwise(ends)
    )


def parts_of(groups: Sequence[GradedGroup]) -> dict[str, list[float | None]]:
    """Name of a part of the reward -> its value for each sample. Names that a group lacks are left
    out."""
    first = groups[0].parts if groups else ()
    names = [name for name in first if all(name in group.parts for group in groups)]
    return {name: [value for group in groups for value in group.parts[name]] for name in names}


def sample_of_each_action(examples: Sequence[Example]) -> torch.Tensor:
    """(E, int64): the number of the sample that each action belongs to."""
    return torch.tensor([e.sample for e in examples for _ in range(e.num_actions)]).long()


def request_of_each_action(groups: Sequence[GradedGroup]) -> torch.Tensor | None:
    """(E, int64): the places of the actions of each sample, by row, in the order of its requests. None
    if all rows have that order."""
    samples = [sample for group in groups for sample in group.samples]
    rows_S = [requested_rows(sample) for sample in samples]
    if all(list(rows) == sorted(rows) for rows in rows_S):
        return None
    parts: list[torch.Tensor] = []
    first = 0
    for sample, rows in zip(samples, rows_S, strict=True):
        sizes = [sum(row.loss_mask[1:]) for row in sample.sequences]
        starts = list(accumulate(sizes, initial=first))
        parts += [torch.arange(starts[row], starts[row + 1]) for row in rows]
        first = starts[-1]
    return torch.cat(parts)


def behaviour_of_each_action(examples: Sequence[Example]) -> torch.Tensor:
    """(E, float64): the logprobs that were recorded when sampling."""
    rows = [e.sequence for e in examples]
    logprobs = [
        logprob
        for row in rows
        for logprob, is_action in zip(row.logprobs[1:], row.loss_mask[1:], strict=True)
        if is_action
    ]
    return torch.tensor(logprobs, dtype=torch.float64)


@torch.no_grad()
def measure_before_update(
    policy: Policy,
    minibatches: Sequence[Sequence[Example]],
    objective: Objective,
    hyperparameters: Hyperparameters,
) -> ActionValues:
    """Measure what needs the policy before the update, by one forward pass over the batch.

    Each tensor has shape (E), float64, on the CPU: "value" (what the critic predicts), "proximal" (log
    pi_prox) and "kl" (the KL estimate, if the KL is part of the reward). When the run needs none of
    them, the result is empty and no pass is computed. "proximal" is needed for several updates with a
    correction and where the objective selects actions, and is returned with every pass.
    """
    has_kl_reward = hyperparameters.kl_coef != 0.0 and hyperparameters.kl_in == "reward"
    has_updates = hyperparameters.updates > 1 or len(minibatches) > 1
    needs_proximal = has_updates and hyperparameters.correction != "ratio"
    selects = objective.select is not None
    if not (has_kl_reward or needs_proximal or objective.has_critic or selects):
        return {}
    is_measured = {"proximal": True, "kl": has_kl_reward, "value": objective.has_critic}
    parts: dict[str, list[torch.Tensor]] = {
        n: [] for n, is_needed in is_measured.items() if is_needed
    }
    for micro in _micro_batches(policy, minibatches, hyperparameters):
        temperature = hyperparameters.temperature
        if objective.has_critic:
            logprob_M, _, value_M = policy.logprobs_and_values(micro, temperature=temperature)
            parts["value"].append(value_M)
        else:
            logprob_M, _ = policy.logprobs(micro, temperature=temperature)
        parts["proximal"].append(logprob_M)
        if has_kl_reward:
            parts["kl"].append(kl_to_reference(policy, micro, logprob_M, hyperparameters))
    empty = torch.zeros(0, dtype=torch.float64)
    return {
        name: torch.cat([empty, *(values_M.double().cpu() for values_M in values)])
        for name, values in parts.items()
    }


def select_actions(
    objective: Objective,
    hyperparameters: Hyperparameters,
    values: ActionValues,
    examples: Sequence[Example],
    known_E: torch.Tensor,
) -> ActionValues:
    """ "selected" (E), 1 for the actions that the objective selects and else 0, by what is known before
    the first update. Empty for an objective that selects nothing. `known_E` (bool) says whether the
    sample has a reward."""
    if objective.select is None:
        return {}
    against_E = values["proximal"]
    if hyperparameters.correction == "ratio":
        against_E = behaviour_of_each_action(examples)
    actions = MeasuredActions(
        logprob_E=values["proximal"],
        log_ratio_E=values["proximal"] - against_E,
        advantage_E=values["advantage"],
        counts_E=known_E & (values["weight"] > 0),
    )
    return {"selected": objective.select(actions, hyperparameters).double()}


def idle_samples(
    groups: Sequence[GradedGroup],
    minibatches: Sequence[Sequence[Example]],
    objective: Objective,
    hyperparameters: Hyperparameters,
    values: ActionValues,
) -> frozenset[int]:
    """The samples of the groups in which no action has a gradient, for example because all rewards are
    equal. In each mini-batch one group is never idle, so that its update has gradients of 0 where it
    would have none, and momentum and weight decay act."""
    if not hyperparameters.skips_idle_groups:
        return frozenset()
    active_E = values["weight"] != 0
    if not _trains_without_advantage(objective, hyperparameters):
        active_E &= (values["advantage"] != 0) | (values.get("selected", torch.zeros(())) != 0)
    group_S = [n for n, group in enumerate(groups) for _ in group.samples]
    idle: set[int] = set()
    first = 0
    for rows in minibatches:
        found: dict[int, bool] = {}
        for row in rows:
            group, end = group_S[row.sample], first + row.num_actions
            if row.num_actions:
                found[group] = found.get(group, False) or bool(active_E[first:end].any())
            first = end
        kept = {group for group, is_active in found.items() if is_active} or {*list(found)[:1]}
        idle |= {row.sample for row in rows if group_S[row.sample] not in kept}
    return frozenset(idle)


def _trains_without_advantage(objective: Objective, hyperparameters: Hyperparameters) -> bool:
    """Whether an action has a gradient besides the one that is multiplied by its advantage."""
    has_kl = hyperparameters.kl_coef != 0.0 and hyperparameters.kl_in == "loss"
    return objective.has_critic or has_kl or hyperparameters.entropy_coef != 0.0


def _micro_batches(
    policy: Policy, minibatches: Sequence[Sequence[Example]], hyperparameters: Hyperparameters
) -> Iterator[MicroBatch]:
    for rows in minibatches:
        yield from pack(
            rows,
            micro_batch_tokens=hyperparameters.micro_batch_tokens,
            splits=hyperparameters.splits_groups,
            share=policy.shares_prompts,
            prefixes=policy.shares_prefixes,
            drops_unread=hyperparameters.drops_unread,
            device=policy.device,
        )
