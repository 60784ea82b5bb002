"""Online DPO: the best and the worst sample of each group as a pair (arXiv 2402.04792, 2405.07863).

    chosen   = the sample of a group with the largest reward, the first of equal ones
    rejected = the sample with the smallest reward, the first of equal ones
    loss     = that of DPO (`trainer/preferences/dpo.py`), a mean over the groups with such a pair

Where trainers differ, we decided:
- A group whose rewards are all equal teaches nothing. TRL, which samples two answers per prompt, takes
  the first as chosen then.
- A sample without a reward, or without a token that the policy chose, is neither best nor worst. In TRL
  a missing reward counts as 0.
- The log-probability of a sample is a sum over all tokens that the policy chose in it, in all its turns
  and rows, at the temperature at which it was sampled. TRL samples at its temperature and scores at 1.
- There is no ratio to the policy that sampled. In the asynchronous modes a pair is older, and is still a
  valid preference.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from schemas.learner import GradedGroup
from trainer.forward.packing import Example
from trainer.preferences import dpo
from trainer.preferences.batch import PreferenceBatch, PreferenceUnit


def pairs_of(groups: Sequence[GradedGroup]) -> PreferenceBatch:
    """The pairs of a step, in the order of its groups. A group without one counts as not learned."""
    chosen = [(group, pair) for group in groups if (pair := pair_of(group)) is not None]
    return PreferenceBatch(
        units=tuple(_unit(group, pair) for group, pair in chosen),
        mismatched=(),
        num_losses=len(chosen),
        num_rows=len(groups),
        num_cut=sum(any(group.samples[i].truncated for i in pair) for group, pair in chosen),
        num_lost=len(groups) - len(chosen),
    )


def pair_of(group: GradedGroup) -> tuple[int, int] | None:
    """The places of the best and of the worst sample of a group. None where no two rewards differ, or
    where both have the same tokens."""
    known = {
        place: reward
        for place, reward in enumerate(group.rewards)
        if reward is not None and math.isfinite(reward) and _rows(group, place)
    }
    if not known:
        return None
    best, worst = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    is_flat = known[best] == known[worst]
    is_same = group.samples[best].sequences == group.samples[worst].sequences
    return None if is_flat or is_same else (best, worst)


def _unit(group: GradedGroup, pair: tuple[int, int]) -> PreferenceUnit:
    return PreferenceUnit(
        tuple(row for place in pair for row in _rows(group, place)), is_chosen=(True, False)
    )


def _rows(group: GradedGroup, place: int) -> list[Example]:
    """The rows of a sample that have an action."""
    rows = [Example(place, row) for row in group.samples[place].sequences]
    return [row for row in rows if row.num_actions]


OBJECTIVE = replace(dpo.OBJECTIVE, from_groups=True)
