"""An evaluation in figures: its attempts by outcome, the spread of their rewards, pass@k and tokens.

An attempt is *graded* when it has a reward, and *passed* with a reward of at least the threshold. An
attempt without a reward *failed*. Attempts that were not made yet, or will not be, are *skipped*.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from infra.readmodel.evaluation_results import RowResult
from infra.spine.ports.event_log import Cursor, EventStore
from schemas.events import EvaluationImported, GroupGraded

PASS_AT_K = re.compile(r"eval/pass@([1-9][0-9]*)")
PAGE = 500


@dataclass(frozen=True, slots=True)
class RewardSpread:
    """The rewards of the graded attempts. `std` is the standard deviation of these attempts, as of a
    whole population."""

    mean: float
    std: float
    min: float
    median: float
    max: float


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """`rows` of the dataset are evaluated with `n` attempts at each, so `attempts` are made in all.
    `reward`, the mean over the attempts that count, and `pass_rate` are None before one does.
    `pass_at_k` is empty until the evaluation ends."""

    rows: int
    n: int
    attempts: int
    graded: int
    passed: int
    failed: int
    skipped: int
    reward: float | None
    pass_rate: float | None
    pass_threshold: float
    rewards: RewardSpread | None
    pass_at_k: Mapping[int, float]

    def to_json(self) -> dict[str, object]:
        """The summary as JSON."""
        return asdict(self)


def summarize(
    results: Sequence[RowResult],
    *,
    rows: int,
    n: int,
    threshold: float,
    metrics: Mapping[str, float],
) -> EvaluationSummary:
    """The figures of an evaluation of `rows` rows from the results so far. `metrics` are those that it
    ended with."""
    attempts = [attempt for result in results for attempt in result.attempts]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    counted = [reward for result in results for reward in result.counted_rewards]
    passes = [value for result in results for value in result.passes]
    return EvaluationSummary(
        rows=rows,
        n=n,
        attempts=rows * n,
        graded=len(rewards),
        passed=int(sum(passes)),
        failed=len(attempts) - len(rewards),
        skipped=rows * n - len(attempts),
        reward=math.fsum(counted) / len(counted) if counted else None,
        pass_rate=sum(passes) / len(passes) if passes else None,
        pass_threshold=threshold,
        rewards=_spread(rewards),
        pass_at_k=pass_at_k_of(metrics),
    )


def pass_at_k_of(metrics: Mapping[str, float]) -> dict[int, float]:
    """pass@k by k, from the metrics of an evaluation."""
    found = ((PASS_AT_K.fullmatch(key), value) for key, value in metrics.items())
    return dict(sorted((int(match[1]), value) for match, value in found if match is not None))


async def count_tokens(log: EventStore, evaluation: str) -> int:
    """The tokens of all prompts and answers of an evaluation (its id), those of repeated attempts
    too. An imported one says how many they are."""
    total, after = 0, Cursor()
    types = [GroupGraded.type, EvaluationImported.type]
    while page := await log.read(evaluation, after=after, limit=PAGE, types=types):
        for recorded in page:
            if isinstance(recorded.event, GroupGraded):
                entries = recorded.event.entries
                total += sum(one.prompt_tokens + one.completion_tokens for one in entries)
            elif isinstance(recorded.event, EvaluationImported):
                total = recorded.event.tokens
        after = page[-1].cursor
    return total


def _spread(rewards: Sequence[float]) -> RewardSpread | None:
    """The spread of rewards; None without any."""
    if not rewards:
        return None
    mean = math.fsum(rewards) / len(rewards)
    return RewardSpread(
        mean=mean,
        std=math.sqrt(math.fsum((one - mean) ** 2 for one in rewards) / len(rewards)),
        min=min(rewards),
        median=statistics.median(rewards),
        max=max(rewards),
    )
