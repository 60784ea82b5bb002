"""Rewards for the tasks of `reasoning-gym`, by the package's own scorers."""

from headrace.reasoning_tasks import load_package, score
from headrace.rewards import reward

load_package()

BEGIN, END = "<answer>", "</answer>"


@reward
def reasoning_gym(
    solution_str: str,
    ground_truth: str | None,
    extra_info: dict[str, object] | None = None,
    **kwargs: object,
) -> float:
    """Return the score of the answer: the text in the last `<answer>...</answer>`, else all of it."""
    _, mark, rest = solution_str.rpartition(BEGIN)
    answer = rest.partition(END)[0] if mark else solution_str
    return score(answer.strip(), dict(extra_info or {}))
