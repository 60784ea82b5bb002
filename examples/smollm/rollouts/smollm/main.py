"""Reward the last number of an answer, by the scorer of the task.

There is no AgentWorkflow, so the policy answers each question in one turn.
"""

import re

from headrace import reward
from headrace.graders import reasoning_gym

NUMBER = re.compile(r"-?\d+")


@reward
def last_number(solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the score of the last number, which is 1.0 if it is the answer. A model that talks before
    it comes to a number runs out of tokens, so it also learns to be brief."""
    numbers = NUMBER.findall(solution_str)
    return reasoning_gym(numbers[-1] if numbers else "", ground_truth, extra_info)
