"""Ready reward functions. Import one in the entry point, and name it in `advanced.rewards`.

    from headrace.graders import gsm8k

    [[advanced.rewards]]
    name = "gsm8k"

All of them return 1.0 for a right answer and 0.0 for any other. Their time grows linearly with the
length of the answer. They import the standard library only. `math_verify` and `reasoning_gym` need a
package in the rollout's own environment, so they are imported only when an entry point asks for them.
"""

from headrace.graders.choices import multiple_choice
from headrace.graders.json_answers import json_schema
from headrace.graders.matching import exact_match, normalized_match
from headrace.graders.numbers import gsm8k

__all__ = [
    "exact_match",
    "gsm8k",
    "json_schema",
    "math_verify",
    "multiple_choice",
    "normalized_match",
    "reasoning_gym",
]


def __getattr__(name: str) -> object:
    if name == "math_verify":
        from headrace.graders.mathematics import math_verify

        return math_verify
    if name == "reasoning_gym":
        from headrace.graders.generated_tasks import reasoning_gym

        return reasoning_gym
    raise AttributeError(f"headrace.graders has no {name!r}; it has: {', '.join(__all__)}")
