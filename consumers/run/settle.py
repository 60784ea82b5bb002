"""Turns graded groups into a batch: decides which groups are kept, and computes the metrics of a step.
Pure functions."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from schemas.artifact_refs import ArtifactRef
from schemas.errors import FAILED_REWARD, POLICY_FAILURES, FailureCategory
from schemas.events import GroupGraded, SettledGroup
from schemas.sampling import Grade, JudgeUsage
from schemas.specs import BatchGroup

NOTHING = ArtifactRef(uri="row:", sha256="0" * 64, size=0)
"""The artifact of a dropped group that has none."""


FLAT = "all its rewards are equal"
"""Why a group without a difference in its rewards is dropped. Its slot may get another row."""


def settle(
    graded: GroupGraded, *, filters: bool = False, compared_parts: Sequence[str] = ()
) -> SettledGroup:
    """Keep a group, or drop it with the reason. A failed or ungraded sample has reward None and is left
    out of the baseline, unless the run gives a reward to samples that failed. A group needs two rewards
    (one, if it has only one sample). With `filters` a group whose rewards are all equal is dropped as
    well. `compared_parts` are the parts of the reward that the run's algorithm compares; a sample that
    lacks one of them has no reward."""
    key = graded.spec.group_key
    by_index = {grade.index: grade for grade in graded.grades}
    found = [by_index.get(entry.index) for entry in graded.entries]
    rewards = tuple(_reward(grade, compared_parts) for grade in found)
    usable = [reward for reward in rewards if reward is not None]
    needed = min(2, graded.spec.template.num_samples)
    dropped = None
    if graded.artifact is None or len(usable) < needed or not _has_tokens(graded, rewards):
        dropped = first_error([graded]) or f"{len(usable)} of {len(rewards)} samples have a reward"
    group = BatchGroup(
        slot=key.slot,
        replacement=key.replacement,
        artifact=graded.artifact or NOTHING,
        rewards=rewards,
        parts={
            name: tuple(
                None if grade is None or reward is None else grade.parts[name]
                for grade, reward in zip(found, rewards, strict=True)
            )
            for name in compared_parts
        },
    )
    if dropped is None and filters and _num_distinct(group) == 1:
        dropped = FLAT
    return SettledGroup(
        group=group,
        version=graded.spec.template.policy.version,
        entries=graded.entries,
        dropped=dropped,
        ungraded=_count_ungraded(graded),
        parts=_mean_parts(graded.grades),
        generate_s=graded.generate_s,
        grade_s=graded.grade_s,
        judged=graded.judged,
        spent=graded.spent,
    )


def batch_of(groups: Sequence[SettledGroup], *, most: int) -> tuple[BatchGroup, ...]:
    """Return the batch of a step whose groups are all settled: at most the first `most` of those that
    are kept, in the order of slots. If there are more, those whose rewards differ come before the
    others. The order in which groups were graded does not matter."""
    kept = [group for group in groups if group.dropped is None]
    first = sorted(kept, key=lambda group: (_is_flat(group), group.group.slot))[:most]
    return tuple(sorted((group.group for group in first), key=lambda group: group.slot))


def _has_tokens(graded: GroupGraded, rewards: Sequence[float | None]) -> bool:
    """Whether there is anything to train on. A sample that failed may have a reward and no tokens."""
    rewarded = zip(graded.entries, rewards, strict=True)
    return any(
        entry.failure is None or entry.completion_tokens > 0
        for entry, reward in rewarded
        if reward is not None
    )


def is_lost(group: SettledGroup) -> bool:
    """Whether a group was dropped because of errors, not because its rewards are all equal."""
    return group.dropped not in (None, FLAT)


def _count_ungraded(graded: GroupGraded) -> dict[str, int]:
    """Count the samples that did not fail but have no reward, by the category of the reason."""
    failed = {entry.index for entry in graded.entries if entry.failure is not None}
    without = [g for g in graded.grades if g.index not in failed and _reward(g) is None]
    category = (g.failure.category if g.failure else FailureCategory.VALIDATION for g in without)
    return dict(sorted(Counter(map(str, category)).items()))


def first_error(graded: Iterable[GroupGraded]) -> str | None:
    """Return the message of the first failure, of a sample or of a grade; None if there is none."""
    for group in graded:
        for entry in group.entries:
            if entry.failure is not None:
                return f"{entry.failure}: {entry.message}"
        for grade in group.grades:
            if grade.failure is not None:
                return f"{grade.failure.category}: {grade.failure.message}"
    return None


def metrics(groups: Sequence[SettledGroup], *, newest: int) -> dict[str, float]:
    """Return the metrics of a step's generation and grading, over all its groups. `newest` is the
    version that the step trains. `train/lag` is how many versions the oldest version that sampled for
    the step lies behind it. A sample counts as failed if it was not generated or has no reward.
    `rollout/raw_reward` is the mean reward, in which a sample that failed because of what the policy
    wrote counts as 0, and one that failed otherwise is left out. `rollout/reward_std` is that of the
    rewards that the step learns from, those of `failed_reward` included. Lengths and tokens cover all
    samples that were generated."""
    rewards = [r for group in groups for r in group.group.rewards if r is not None]
    counted = [r for group in groups for r in _counted_rewards(group)]
    entries = [entry for group in groups for entry in group.entries]
    generated = [entry for entry in entries if entry.failure is None]
    failed = Counter(entry.failure for entry in entries if entry.failure)
    for group in groups:
        failed.update(group.ungraded)
    figures = {
        "rollout/num_samples": float(len(entries)),
        "rollout/failed_ratio": failed.total() / max(1, len(entries)),
        "rollout/dropped_groups": float(sum(group.dropped is not None for group in groups)),
        "rollout/zero_variance_ratio": _mean([_is_flat(group) for group in groups]),
        "rollout/response_lengths": _mean([float(e.completion_tokens) for e in generated]),
        "rollout/total_lengths": _mean(
            [float(e.prompt_tokens + e.completion_tokens) for e in generated]
        ),
        "rollout/truncated_ratio": _mean([float(e.truncated) for e in generated]),
        "rollout/tokens": float(sum(entry.completion_tokens for entry in generated)),
        "train/lag": float(max((newest - group.version for group in groups), default=0)),
        "time/generate_s": max((group.generate_s for group in groups), default=0.0),
        "time/grade_s": max((group.grade_s for group in groups), default=0.0),
    }
    if counted:
        figures["rollout/raw_reward"] = _mean(counted)
    if rewards:
        figures["rollout/reward_std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    for why, count in sorted(failed.items()):
        figures[f"failed/{why}"] = count / len(entries)
    if judged := [group.judged for group in groups if group.judged is not None]:
        usage = sum(judged, JudgeUsage())
        figures |= {
            "judge/calls": float(usage.calls),
            "judge/tokens": float(usage.tokens),
            "judge/usd": usage.usd,
        }
    for name in sorted({name for group in groups for name in group.parts}):
        figures[f"reward/{name}"] = _mean([g.parts[name] for g in groups if name in g.parts])
    return figures


def _counted_rewards(group: SettledGroup) -> Iterator[float]:
    """The rewards of a group as its figures count them."""
    for entry, reward in zip(group.entries, group.group.rewards, strict=False):
        if entry.failure in POLICY_FAILURES:
            yield FAILED_REWARD
        elif reward is not None:
            yield reward


def _is_flat(group: SettledGroup) -> float:
    return float(_num_distinct(group.group) <= 1)


def _num_distinct(group: BatchGroup) -> int:
    """The number of different rewards in a group, or of their different parts if these are compared."""
    compared = zip(*(group.parts.values() or [group.rewards]), strict=True)
    return len({values for values in compared if None not in values})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _reward(grade: Grade | None, compared_parts: Sequence[str] = ()) -> float | None:
    if grade is None or grade.reward is None or not math.isfinite(grade.reward):
        return None
    return grade.reward if all(name in grade.parts for name in compared_parts) else None


def _mean_parts(grades: Sequence[Grade]) -> dict[str, float]:
    names = sorted({name for grade in grades for name in grade.parts})
    return {name: _mean([g.parts[name] for g in grades if name in g.parts]) for name in names}
