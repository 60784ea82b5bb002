"""The memory that a step holds, as the benchmark counts it."""

import pytest
import torch

from bench.b12_memory import PROMPT, SAMPLES, living, peak, policy_of
from schemas.learner import RULES
from tests.unit.trainer.support import TINY

ANSWER = 24
GROUP = PROMPT + SAMPLES * ANSWER
COMPUTED = GROUP - SAMPLES
"""Its tokens without the last one of each answer, which is a target only."""


def test_it_counts_what_lives() -> None:
    with living() as seen:
        first = torch.zeros(1000)
        second = first + 1
        first.add_(second)
        view = first[10:]
        del first, second
        third = torch.zeros(500) if view is not None else view
    assert seen.peak == 8000
    assert sum(seen.held.values()) == 4000 + third.nbytes


def test_memory_grows_with_the_micro_batch_and_not_with_the_batch() -> None:
    policy, config = policy_of(TINY)

    def bytes_of(groups: int, micro: int) -> int:
        found, batch, largest = peak(
            policy, config, num_groups=groups, answer=ANSWER, micro_batch_tokens=micro * GROUP
        )
        assert (batch, largest) == (groups * COMPUTED, micro * COMPUTED)
        return found

    small = bytes_of(2, 1)
    assert bytes_of(8, 1) == pytest.approx(small, rel=0.05), "what a batch adds is a few numbers"
    assert bytes_of(8, 4) > 2.5 * small, "twin: in one micro-batch the growth is seen"


def test_memory_does_not_grow_with_a_group_that_shares_its_prompt() -> None:
    policy, config = policy_of(TINY)

    def bytes_of(samples: int, rules: int) -> int:
        sizes = {"answer": ANSWER, "micro_batch_tokens": GROUP, "samples": samples}
        found, _, largest = peak(policy, config, num_groups=1, rules=rules, **sizes)
        assert (largest <= GROUP) == (samples == SAMPLES or rules == RULES)
        return found

    small = bytes_of(SAMPLES, RULES)
    assert bytes_of(4 * SAMPLES, RULES) == pytest.approx(small, rel=0.1)
    assert bytes_of(4 * SAMPLES, 1) > 2 * small, "twin: undivided it grows"
