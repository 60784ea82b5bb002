"""Checks whether a run still learns: finds steps that changed nothing, and rewards that are all equal.
Pure functions."""

from collections.abc import Mapping

from schemas.algorithms import DISTILLED, GROUPED
from schemas.config import Advanced
from schemas.errors import POLICY_FAILURES, FailureCategory

MOST_UNHEALTHY = 3
"""This many steps in a row without a finite gradient end the run, because the next would be the same."""

MOST_LOST = 5
"""This many steps in a row whose groups were all dropped because of errors end the run."""

FLAT_STEPS = 5
"""After this many steps in a row with nothing to learn from, the run warns."""


MOST_FAILED = 0.2
"""If more than this share of a step's samples failed, the run warns."""

CURES = {
    FailureCategory.AGENT: "Correct the workflow",
    FailureCategory.TIMEOUT: "Raise training.agent_workflow_timeout_s",
    FailureCategory.PROMPT_TOO_LONG: "Raise training.max_prompt_length",
    FailureCategory.GRADER: "Correct the grader",
}
"""The likely cure of a frequent failure."""


def frequent_failure(metrics: Mapping[str, float]) -> str | None:
    """The most frequent category of failures of a step, if too many of its samples failed."""
    if metrics.get("rollout/failed_ratio", 0.0) <= MOST_FAILED:
        return None
    shares = {key: share for key, share in metrics.items() if key.startswith("failed/")}
    return max(sorted(shares), key=lambda key: shares[key]).removeprefix("failed/")


def failures_warning(
    metrics: Mapping[str, float], *, step: int, run: str, category: str, example: str, kept: bool
) -> str:
    """Say how many samples of a step failed, what fails most, and which key to set. `example` is one
    message of this category, or empty. `kept` says whether such samples are trained on."""
    all_failed, share = metrics["rollout/failed_ratio"], metrics[f"failed/{category}"]
    quoted = f": {example.rstrip('.')}" if example else ""
    cure = CURES.get(FailureCategory(category), f"`headrace train logs {run}` shows all errors")
    teach = (
        ", or set advanced.failed_reward, so that the policy learns to avoid this"
        if category in POLICY_FAILURES and not kept
        else ""
    )
    return (
        f"{all_failed:.0%} of the samples of step {step} failed, most of them ({share:.0%}) with "
        f"{category}{quoted}. {cure}{teach}"
    )


def is_unhealthy(metrics: Mapping[str, float]) -> bool:
    """Whether loss or gradients were not finite, so that the step left the weights as they were."""
    return bool(metrics.get("train/skipped"))


def is_flat(metrics: Mapping[str, float], advanced: Advanced) -> bool:
    """Whether the rewards of a step left nothing to learn: they are all equal in each group, or in the
    whole batch if the batch is the baseline. Distillation does not learn from rewards."""
    if advanced.algorithm in DISTILLED:
        return False
    if advanced.algorithm in GROUPED or advanced.group_baseline:
        return metrics.get("rollout/zero_variance_ratio") == 1.0
    return metrics.get("rollout/reward_std") == 0.0


def is_masked(metrics: Mapping[str, float], advanced: Advanced) -> bool:
    """Whether every answer of a step was cut off, so that `mask_truncated` left nothing to train on."""
    return bool(advanced.mask_truncated) and metrics.get("rollout/truncated_ratio") == 1.0


def unhealthy_step_message(step: int) -> str:
    """Say why a step is skipped although it was trained: it changed nothing."""
    return (
        f"the loss or the gradients of step {step} are not finite; the weights do not change, and "
        "the batch is kept"
    )


def divergence_message(step: int, *, run: str, checkpoint: int | None) -> str:
    """Say why a run ends after too many steps that changed nothing."""
    first = step - MOST_UNHEALTHY + 1
    good = f"{run}@{checkpoint}" if checkpoint else "none"
    return (
        f"the loss or the gradients were not finite in {MOST_UNHEALTHY} steps in a row ({first} to "
        f"{step}); last good checkpoint: {good}. Lower training.lr, or check the batches of these "
        "steps and the grader's rewards"
    )


def masked_warning(step: int, *, num_steps: int) -> str:
    """Say which key to raise when all answers are cut off and left out."""
    return (
        f"all answers were cut off in {_when(step, num_steps)}, and advanced.mask_truncated leaves them "
        "out, so nothing is learned. Raise training.max_response_length, or remove mask_truncated"
    )


def _when(step: int, num_steps: int) -> str:
    return f"the {num_steps} steps up to step {step}" if num_steps > 1 else f"step {step}"


def flat_warning(step: int, *, num_steps: int) -> str:
    """Say what to check when all rewards are equal."""
    when = _when(step, num_steps)
    return (
        f"all rewards that are compared with each other were equal in {when}, so nothing is learned. "
        "Check the grader's rewards, or use questions that the policy answers correctly sometimes, and "
        "not always or never"
    )


def all_failed_message(step: int, reason: str) -> str:
    """Say why a run ends with a step in which no sample has a reward."""
    return (
        f"every sample of step {step} failed; the first error: {reason}. Nothing can be trained on such "
        "a step. Correct that error in the workspace, and submit the run again"
    )


def all_lost_message(num_steps: int, first_error: str) -> str:
    """Say why a run ends when its steps had some rewards, but too few in each group to train on."""
    return (
        f"nothing was trained in {num_steps} steps in a row, because errors left each of their groups "
        f"with too few rewards; the first error, in {first_error}. Correct that error in the workspace, "
        "and submit the run again"
    )


def never_trained_message(first_error: str) -> str:
    """Say why a run fails when it has taken all its steps and trained in none of them."""
    return (
        "no step of this run was trained, so its weights have not changed; the first error, in "
        f"{first_error}. Correct that error in the workspace, and submit the run again"
    )
