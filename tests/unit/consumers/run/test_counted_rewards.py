"""The mean reward of a step counts what the policy failed."""

import pytest

from consumers.run.settle import metrics
from schemas.events import SettledGroup
from schemas.specs import BatchGroup, SampleEntry
from tests.kit.specs import ref


@pytest.mark.parametrize(("why", "reward"), [("agent_error", 0.5), ("internal_error", 1.0)])
def test_the_policy_s_failures_count_as_0_and_others_are_left_out(why: str, reward: float) -> None:
    group = SettledGroup(
        group=BatchGroup(slot=0, replacement=0, artifact=ref("g"), rewards=(1.0, None)),
        entries=(SampleEntry(index=0), SampleEntry(index=1, failure=why)),
    )
    assert metrics([group], newest=0)["rollout/raw_reward"] == reward
