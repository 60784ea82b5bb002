"""The figures of a regrade: how the new rewards of recorded samples differ from those before.

A group gives sums (`sums_of`), sums add up in any order of groups, and a report is computed from them
(`report_of`). So memory does not grow with the number of samples. All functions are pure.

Only a sample that has a reward before and after counts in flips, ranks and advantages. A sample that
has none is counted as such, and never as a reward of 0.
"""

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from schemas.sampling import Value

Reward = float | None


def _is_zero(value: object) -> bool:
    return not value


class RegradeSums(Value):
    """Sums over groups of recorded samples.

    `before` and `after` count the samples with a reward, and `total_before` and `total_after` are the
    sums of these rewards. `both` counts those that have both rewards; `both_before` and `both_after` are
    sums over them. `lost` have a reward before only, and `found` after only. `crossed` are the samples
    that moved from above the mean of their group to below it or back, and `flipped` those whose reward
    passed the threshold. `tau` is the sum of Kendall's tau-b over `ranked` groups. Of the `groups`,
    `flattened` lost all differences between their rewards, `spread` gained one, and `flat` have none
    before and after. `advantages` counts the samples whose advantage is not 0 before or after, and
    `turned` those of them whose advantage has another sign.
    """

    groups: int = Field(default=0, exclude_if=_is_zero)
    samples: int = Field(default=0, exclude_if=_is_zero)
    before: int = Field(default=0, exclude_if=_is_zero)
    after: int = Field(default=0, exclude_if=_is_zero)
    both: int = Field(default=0, exclude_if=_is_zero)
    lost: int = Field(default=0, exclude_if=_is_zero)
    found: int = Field(default=0, exclude_if=_is_zero)
    total_before: float = Field(default=0.0, exclude_if=_is_zero)
    total_after: float = Field(default=0.0, exclude_if=_is_zero)
    both_before: float = Field(default=0.0, exclude_if=_is_zero)
    both_after: float = Field(default=0.0, exclude_if=_is_zero)
    changed: int = Field(default=0, exclude_if=_is_zero)
    crossed: int = Field(default=0, exclude_if=_is_zero)
    flipped: int = Field(default=0, exclude_if=_is_zero)
    tau: float = Field(default=0.0, exclude_if=_is_zero)
    ranked: int = Field(default=0, exclude_if=_is_zero)
    flattened: int = Field(default=0, exclude_if=_is_zero)
    spread: int = Field(default=0, exclude_if=_is_zero)
    flat: int = Field(default=0, exclude_if=_is_zero)
    advantages: int = Field(default=0, exclude_if=_is_zero)
    turned: int = Field(default=0, exclude_if=_is_zero)

    def __add__(self, other: "RegradeSums") -> "RegradeSums":
        return RegradeSums.model_construct(
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in RegradeSums.model_fields
            }
        )


class RegradeReport(Value):
    """The figures of a regrade, over all its groups or over those of a step. Shares are from 0 to 1. A
    figure is None where nothing defines it, for example the rank agreement of groups whose rewards are
    all equal."""

    groups: int
    samples: int
    graded_before: int
    graded_after: int
    lost: int
    found: int
    reward_before: float | None
    reward_after: float | None
    changed_share: float | None
    mean_flip_share: float | None
    threshold_flip_share: float | None
    kendall_tau: float | None
    ranked_groups: int
    groups_flattened: int
    groups_spread: int
    groups_flat: int
    advantage_sign_share: float | None


class Disagreement(Value):
    """A sample that both gradings gave a reward, and how far they differ."""

    sample: str
    step: int
    before: float
    after: float

    @property
    def rank(self) -> tuple[float, str]:
        """The order of disagreements: the largest difference first, then by the sample's id."""
        return (-abs(self.after - self.before), self.sample)


def sums_of(
    before: Sequence[Reward],
    after: Sequence[Reward],
    *,
    threshold: float,
    compares_groups: bool = True,
) -> RegradeSums:
    """Return the sums of one group, from the rewards of its samples in the same order. With
    `compares_groups` the run's algorithm compares the rewards of a group, so that the sign of an
    advantage is that of the reward minus the mean of the group; otherwise no advantage is counted."""
    known_before = [reward for reward in before if reward is not None]
    known_after = [reward for reward in after if reward is not None]
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    sides_before, sides_after = sides_of(before), sides_of(after)
    sides = [
        (b, a)
        for b, a in zip(sides_before, sides_after, strict=True)
        if b is not None and a is not None
    ]
    firsts, seconds = [b for b, _ in pairs], [a for _, a in pairs]
    tau = kendall_tau(firsts, seconds)
    was_flat, is_flat = _is_flat(firsts), _is_flat(seconds)
    counted = [(b, a) for b, a in sides if b or a] if compares_groups else []
    return RegradeSums(
        groups=1,
        samples=len(before),
        before=len(known_before),
        after=len(known_after),
        both=len(pairs),
        lost=len(known_before) - len(pairs),
        found=len(known_after) - len(pairs),
        total_before=math.fsum(known_before),
        total_after=math.fsum(known_after),
        both_before=math.fsum(firsts),
        both_after=math.fsum(seconds),
        changed=sum(b != a for b, a in pairs),
        crossed=sum(b * a < 0 for b, a in sides),
        flipped=sum((b >= threshold) != (a >= threshold) for b, a in pairs),
        tau=tau or 0.0,
        ranked=int(tau is not None),
        flattened=int(bool(pairs) and is_flat and not was_flat),
        spread=int(bool(pairs) and was_flat and not is_flat),
        flat=int(bool(pairs) and was_flat and is_flat),
        advantages=len(counted),
        turned=sum(b != a for b, a in counted),
    )


def report_of(sums: RegradeSums) -> RegradeReport:
    """Return the figures that these sums give."""
    return RegradeReport(
        groups=sums.groups,
        samples=sums.samples,
        graded_before=sums.before,
        graded_after=sums.after,
        lost=sums.lost,
        found=sums.found,
        reward_before=_ratio(sums.total_before, sums.before),
        reward_after=_ratio(sums.total_after, sums.after),
        changed_share=_ratio(sums.changed, sums.both),
        mean_flip_share=_ratio(sums.crossed, sums.both),
        threshold_flip_share=_ratio(sums.flipped, sums.both),
        kendall_tau=_ratio(sums.tau, sums.ranked),
        ranked_groups=sums.ranked,
        groups_flattened=sums.flattened,
        groups_spread=sums.spread,
        groups_flat=sums.flat,
        advantage_sign_share=_ratio(sums.turned, sums.advantages),
    )


def add_by_step(
    first: Mapping[int, RegradeSums], second: Mapping[int, RegradeSums]
) -> dict[int, RegradeSums]:
    """Return the sums of both, by step."""
    added = dict(first)
    for step, sums in second.items():
        added[step] = added[step] + sums if step in added else sums
    return dict(sorted(added.items()))


def worst_of(found: Sequence[Disagreement], *, most: int) -> tuple[Disagreement, ...]:
    """Return the largest disagreements, the largest first."""
    return tuple(sorted((one for one in found if one.before != one.after), key=_rank)[:most])


def _rank(one: Disagreement) -> tuple[float, str]:
    return one.rank


def sides_of(rewards: Sequence[Reward]) -> list[int | None]:
    """Return for each sample of a group on which side of the group's mean it is: 1 above, -1 below, 0
    where all rewards are equal or the reward is the mean. It is None without a reward."""
    known = [reward for reward in rewards if reward is not None]
    if _is_flat(known):
        return [None if reward is None else 0 for reward in rewards]
    mean = math.fsum(known) / len(known)
    return [None if reward is None else (reward > mean) - (reward < mean) for reward in rewards]


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two rankings of the same samples, from -1 to 1. It is None where one of
    them ranks nothing, because all its values are equal."""
    agree = differ = tied_first = tied_second = 0
    for place, (a, b) in enumerate(zip(first, second, strict=True)):
        for c, d in zip(first[:place], second[:place], strict=True):
            across, down = (a > c) - (a < c), (b > d) - (b < d)
            agree += across * down > 0
            differ += across * down < 0
            tied_first += across == 0 and down != 0
            tied_second += down == 0 and across != 0
    ranked = agree + differ
    of_first, of_second = ranked + tied_second, ranked + tied_first
    if not of_first or not of_second:
        return None
    return (agree - differ) / math.sqrt(of_first * of_second)


def _is_flat(rewards: Sequence[float]) -> bool:
    return len(rewards) < 2 or min(rewards) == max(rewards)


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None
