"""Reward health: bounded work, and groups that teach nothing."""

from producers.dashboard.pages.health import SHOWN_STEPS, step_health, thinned_steps
from schemas.sampling import Grade


def test_a_long_run_is_shown_at_few_steps_and_at_its_last_one() -> None:
    steps = thinned_steps(10_000)
    assert len(steps) == len(set(steps)) == SHOWN_STEPS
    assert steps[-1] == 10_000
    assert thinned_steps(3) == [1, 2, 3]
    assert thinned_steps(0) == []


def test_groups_with_equal_rewards_are_counted_and_samples_without_a_reward_are_not() -> None:
    same = (Grade(index=0, reward=1.0), Grade(index=1, reward=1.0), Grade(index=2, reward=None))
    spread = (Grade(index=0, reward=0.0), Grade(index=1, reward=1.0))
    health = step_health([same, spread], 0.0, 1.0)
    assert health["same"] == 1
    assert health["mean"] == 0.75
    assert health["bins"] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 3]
