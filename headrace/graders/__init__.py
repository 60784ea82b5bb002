"""Ready reward functions. Import one in the entry point, and name it in `advanced.rewards`.

    from headrace.graders import gsm8k

    [[advanced.rewards]]
    name = "gsm8k"

All of them return 1.0 for a right answer and 0.0 for any other. Their time grows linearly with the
length of the answer. They import the standard library only. `math_verify` needs the package
`math-verify` in the rollout's own environment, so it is imported only when an entry point asks for it.
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
]


def __getattr__(name: str) -> object:
    if name == "math_verify":
        from headrace.graders.mathematics import math_verify

        return math_verify
    raise AttributeError(f"headrace.graders has no {name!r}; it has: {', '.join(__all__)}")
