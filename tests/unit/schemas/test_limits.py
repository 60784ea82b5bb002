"""Every input that is admitted fits into its events."""

import pytest

from schemas.config import RewardWeight
from schemas.events import MAX_EVENT_BYTES, BatchAssembled, GroupGraded
from schemas.limits import most_groups, most_samples
from schemas.sampling import Grade
from schemas.specs import BatchGroup, SampleEntry
from tests.kit.specs import group_spec, ref, template


@pytest.mark.parametrize("num_rewards", [0, 1, 12, 60])
def test_the_largest_group_that_is_admitted_fits_into_its_event(num_rewards: int) -> None:
    rewards = tuple(RewardWeight(name=f"a_reward_function_{n}") for n in range(num_rewards))
    num = most_samples([reward.name for reward in rewards])
    parts = {reward.name: -1.2345678901234567e-100 for reward in rewards}
    event = GroupGraded(
        spec=group_spec(template(num_samples=num)),
        artifact=ref("group"),
        entries=tuple(
            SampleEntry(
                index=n,
                prompt_tokens=99_999,
                completion_tokens=99_999,
                num_turns=99,
                truncated=True,
            )
            for n in range(num)
        ),
        grades=tuple(Grade(index=n, reward=-1.2345678901234567, parts=parts) for n in range(num)),
    )
    size = len(event.model_dump_json().encode())
    assert size <= MAX_EVENT_BYTES


@pytest.mark.parametrize(("samples", "num_parts"), [(8, 0), (8, 2), (4, 40), (100, 3)])
def test_the_largest_batch_that_is_admitted_fits_into_its_event(
    samples: int, num_parts: int
) -> None:
    names = [f"a_reward_function_{n}" for n in range(num_parts)]
    values = (-1234.5678901234567,) * samples
    group = BatchGroup(
        slot=999,
        replacement=9,
        artifact=ref("group"),
        rewards=values,
        parts=dict.fromkeys(names, values),
    )
    groups = (group,) * most_groups(samples, names)
    assert groups
    event = BatchAssembled(run="run-0123456789ab", step=9999, groups=groups)
    assert len(event.model_dump_json().encode()) <= MAX_EVENT_BYTES
