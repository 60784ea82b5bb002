"""Checks the config of a fork against that of its parent."""

from collections.abc import Iterator, Mapping

from schemas.algorithms import SAMPLED
from schemas.config import RunConfig
from schemas.errors import InvalidConfig, Issue
from schemas.events import RunRequested
from schemas.limits import total_steps
from schemas.models.fork import ForkPoint

ADAPTER = "the tensors of the policy at the step have this shape"
STATE = "the state of the optimizer at the step is of this kind"
FIXED = {
    "experiment.model_path": "the weights at the step are trained on top of this model",
    "experiment.dataset": "the steps before the fork are steps over these rows",
    "advanced.tuning": ADAPTER,
    "advanced.lora_rank": ADAPTER,
    "advanced.lora_alpha": ADAPTER,
    "advanced.lora_scaling": ADAPTER,
    "advanced.lora_variant": ADAPTER,
    "advanced.lora_targets": ADAPTER,
    "advanced.precision": "the policy at the step was trained on a base of this precision",
    "advanced.optimizer": STATE,
    "advanced.teacher": "the state at the step names this teacher",
}
"""The keys that cannot change in a fork, and why."""

FREE_STATE = tuple(name for name in SAMPLED if name != "ppo")
"""Algorithms whose state is that of the policy and its optimizer alone, so that one can follow another.
PPO has a critic too."""


def flatten(config: RunConfig) -> dict[str, object]:
    """Return the values of a config by their keys, such as `training.lr`."""
    sections = config.model_dump(mode="json")
    return {
        f"{section}.{key}": value
        for section, table in sections.items()
        for key, value in (table.items() if isinstance(table, Mapping) else ())
    } | {name: value for name, value in sections.items() if not isinstance(value, Mapping)}


def require_forkable(parent: RunRequested, config: RunConfig, point: ForkPoint) -> int:
    """Return the last step of a fork with this config. Raises InvalidConfig with the keys that cannot
    change, or when there is no step after the fork."""
    if issues := tuple(issues_of_fork(parent.config, config)):
        raise InvalidConfig("; ".join(f"{i.key} {i.message}" for i in issues), issues=issues)
    steps = total_steps(config, parent.dataset.num_rows)
    if steps <= point.step:
        message = (
            f"would end with step {steps}, and the fork begins after step {point.step}; fork at an "
            "earlier step, or set a larger advanced.max_steps"
        )
        raise InvalidConfig(f"the run {message}", issues=(Issue("advanced.max_steps", message),))
    return steps


def issues_of_fork(parent: RunConfig, child: RunConfig) -> Iterator[Issue]:
    """The keys of a fork that cannot differ from those of its parent, and why."""
    ours, theirs = flatten(child), flatten(parent)
    for key, reason in FIXED.items():
        if ours.get(key) != theirs.get(key):
            kept = theirs.get(key)
            text = f"cannot change in a fork, because {reason}; keep {kept!r}, or submit a new run"
            yield Issue(key, text)
    old, new = parent.advanced.algorithm, child.advanced.algorithm
    if old != new and not (old in FREE_STATE and new in FREE_STATE):
        yield Issue(
            "advanced.algorithm",
            f"cannot change from {old} to {new} in a fork, because they keep different state; keep "
            f"{old}, or submit a new run",
        )
    if (parent.advanced.entropy_target is None) != (child.advanced.entropy_target is None):
        yield Issue(
            "advanced.entropy_target",
            "cannot be added or removed in a fork, because the state at the step says whether there is "
            "one; keep it, or submit a new run",
        )
