"""What a run does with samples that the policy made fail."""

from typing import Any

import pytest

from schemas.algorithms import failed_rewards
from schemas.config import Advanced


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"failed_reward": "drop"}, {}),
        ({"failed_reward": -1}, {"agent_error": -1, "timeout": -1, "prompt_too_long": -1}),
        (
            {"failed_reward": 0, "failed_rewards": {"timeout": "drop", "agent_error": "grade"}},
            {"agent_error": "grade", "prompt_too_long": 0},
        ),
        ({"failed_rewards": {"agent_error": 0.0}}, {"agent_error": 0.0}),
    ],
)
def test_a_category_s_own_key_comes_first(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert failed_rewards(Advanced(**keys)) == expected
