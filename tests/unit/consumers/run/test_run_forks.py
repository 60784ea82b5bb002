"""What a fork keeps of its parent, and what it measures itself."""

import pytest

from consumers.run.consumer import CONSUMER
from schemas.events import EvaluationRequested
from schemas.models.fork import ForkPoint
from tests.kit.decider import Given
from tests.unit.consumers.runs import Story, only, requested, validated


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_fork_is_validated_at_its_beginning_unless_the_parent_s_first_reward_is_known(
    *, is_measured: bool
) -> None:
    """Otherwise the reward of a later step would be the one before training."""
    request = requested(steps=3, validate=True)
    story = Story(request)
    (zero,) = only(story.begin(), EvaluationRequested)
    if is_measured:
        story.tell(validated(zero))
    point = ForkPoint(parent="r1", step=0, position=3, policy_position=1)
    child = request.model_copy(update={"fork": point})
    story.world = Given(CONSUMER, (*story.world.events, child))
    assert [one.step for one in only(story.begin(), EvaluationRequested)] == [0] * (not is_measured)
