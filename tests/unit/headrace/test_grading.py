"""The results that a grader may return for the samples that it is given."""

import pytest

from headrace.grading import GraderContext, Sample


def context(num: int) -> GraderContext:
    samples = {f"sample_{n}": Sample(f"sample_{n}", n, "text", []) for n in range(num)}
    return GraderContext(label="4", metadata={}, samples=samples)


def test_the_only_sample_needs_no_name() -> None:
    ctx = context(1)
    ctx.set_reward(0.5)
    assert ctx.rewards == {"sample_0": 0.5}


@pytest.mark.parametrize("num", [0, 2])
def test_without_a_name_it_must_be_the_only_one(num: int) -> None:
    with pytest.raises(ValueError, match="set_sample_reward"):
        context(num).set_reward(0.5)


def test_a_name_that_is_not_there_is_told_which_are() -> None:
    with pytest.raises(
        KeyError, match="there is no sample 'sample_9'; there are: sample_0, sample_1"
    ):
        context(2).set_sample_reward("sample_9", 1.0)
