"""What each algorithm reads of `[advanced]`, and what it asks of the run around it.

A key that an algorithm does not read is refused at submit, never ignored. The formulas, and the values
where a run is silent, stand in `trainer/algorithms/registry.py`; here is what submit and the run's
orchestrator must know without torch.
"""

from collections.abc import Iterator

from schemas.config import Advanced, RunConfig
from schemas.errors import Issue

CLIPPED = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "ppo")
"""They bound the ratio on both sides."""

GROUPED = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "importance_sampling")
"""Their advantages compare the samples of a group: one whose rewards are all equal teaches nothing."""

REINFORCED = (*GROUPED, "reinforce_plus_plus", "ppo")

READ_BY: dict[str, tuple[str, ...]] = {
    "clip_low": CLIPPED,
    "clip_high": (*CLIPPED, "cispo"),
    "clip_delta": CLIPPED,
    "loss_aggregation": REINFORCED,
    "kl_coef": REINFORCED,
    "kl_estimator": REINFORCED,
    "kl_in": REINFORCED,
    "correction_level": REINFORCED,
    "correction_low": REINFORCED,
    "correction_high": REINFORCED,
    "off_policy_threshold": REINFORCED,
    "filter_groups": GROUPED,
    "max_replacements": GROUPED,
    "overlong_buffer": REINFORCED,
    "overlong_penalty": REINFORCED,
    "group_baseline": ("reinforce_plus_plus",),
    "gamma": ("reinforce_plus_plus", "ppo"),
    "gae_lambda": ("ppo",),
    "value_clip": ("ppo",),
    "value_coef": ("ppo",),
    "critic_lr": ("ppo",),
    "loss_turns": ("sft",),
}
"""Key -> the algorithms that read it; every other algorithm is given None."""

DEFAULT_REPLACEMENTS = 4


CLIP_HIGH: dict[str, float] = {"dapo": 0.28, "gspo": 4e-4}
"""Where the upper clip differs from 0.2 unless the run says otherwise."""


def filters_groups(advanced: Advanced) -> bool:
    """Whether a group without spread in its rewards is left out of its batch: in DAPO unless it is
    told not to, in the others only when told to."""
    wanted = advanced.filter_groups
    return advanced.algorithm == "dapo" if wanted is None else wanted


def replacements(advanced: Advanced) -> int:
    """How often a filtered group is replaced by another row's before its slot stays empty."""
    if not filters_groups(advanced):
        return 0
    most = advanced.max_replacements
    return DEFAULT_REPLACEMENTS if most is None else most


def objective_issues(config: RunConfig) -> Iterator[Issue]:
    """Keys that the algorithm does not read, and values that contradict each other."""
    advanced = config.advanced
    yield from _unread(advanced)
    yield from _uncorrected(advanced)
    clip_high = advanced.clip_high or CLIP_HIGH.get(advanced.algorithm, 0.2)
    if advanced.clip_delta is not None and advanced.clip_delta <= 1 + clip_high:
        yield Issue(
            "advanced.clip_delta",
            f"must be above 1 + clip_high, got {advanced.clip_delta:g}: it bounds what lies beyond",
        )
    buffer, longest = advanced.overlong_buffer, config.training.max_response_length
    if buffer is not None and buffer > longest:
        yield Issue(
            "advanced.overlong_buffer",
            f"must be at most training.max_response_length ({longest}), got {buffer}",
        )
    if advanced.overlong_penalty is not None and not buffer:
        yield Issue("advanced.overlong_penalty", "needs advanced.overlong_buffer: where it begins")
    if advanced.max_replacements is not None and not filters_groups(advanced):
        yield Issue("advanced.max_replacements", "needs advanced.filter_groups = true")
    if advanced.algorithm in GROUPED and config.training.n_samples_per_prompt < 2:
        yield Issue(
            "training.n_samples_per_prompt",
            f"must be at least 2 for {advanced.algorithm}, which compares the samples of a group; "
            "ppo and reinforce_plus_plus learn from one",
        )


DEPTHS: dict[str, range] = {
    "sync": range(1),
    "one_step_off_async": range(1, 2),
    "fully_async": range(1, 65),
}
"""By execution mode: the values that max_steps_off_policy may have."""


def mode_issues(advanced: Advanced) -> Iterator[Issue]:
    """What contradicts the execution mode."""
    mode, depth = advanced.execution_mode, advanced.max_steps_off_policy
    if advanced.algorithm == "sft":
        yield from _nothing_sampled(advanced)
        return
    allowed = DEPTHS[mode]
    if depth is None or depth in allowed:
        return
    low, high = allowed.start, allowed.stop - 1
    must = f"must be {low}" if low == high else f"must be from {low} to {high}"
    other = "sync" if depth == 0 else "fully_async"
    yield Issue(
        "advanced.max_steps_off_policy",
        f"{must} in {mode} mode, got {depth}; for {depth}, set advanced.execution_mode to {other!r}",
    )


def _nothing_sampled(advanced: Advanced) -> Iterator[Issue]:
    given = {
        "execution_mode": advanced.execution_mode != "sync",
        "max_steps_off_policy": bool(advanced.max_steps_off_policy),
        "weight_sync_interval": advanced.weight_sync_interval != 1,
    }
    for key in (key for key, other in given.items() if other):
        yield Issue(f"advanced.{key}", "has no meaning for sft: nothing is sampled; leave it out")


def _unread(advanced: Advanced) -> Iterator[Issue]:
    for key, readers in READ_BY.items():
        if getattr(advanced, key) is not None and advanced.algorithm not in readers:
            those = "the reinforcement learning algorithms"
            known = those if readers == REINFORCED else ", ".join(readers)
            yield Issue(
                f"advanced.{key}", f"has no meaning for {advanced.algorithm}; {known} read it"
            )
    if advanced.algorithm == "sft" and advanced.correction != "ratio":
        yield Issue("advanced.correction", "has no meaning for sft: nothing is sampled")
    if advanced.algorithm == "sft" and advanced.updates_per_step != 1:
        yield Issue("advanced.updates_per_step", "must be 1 for sft; see training.total_epochs")


def _uncorrected(advanced: Advanced) -> Iterator[Issue]:
    reads = {
        "ratio": (),
        "decoupled": ("correction_level",),
        "truncated": ("correction_level", "correction_high"),
        "masked": ("correction_level", "correction_low", "correction_high"),
    }[advanced.correction]
    for key in ("correction_level", "correction_low", "correction_high"):
        if getattr(advanced, key) is not None and key not in reads:
            yield Issue(
                f"advanced.{key}", f"has no meaning with correction = {advanced.correction!r}"
            )
