"""A calculator, and a grader of products."""

import re

from headrace import Grader


def calculate(of: str) -> int:
    """The value of a sum or a product, such as 47*86. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,6})([+*])(\d{1,6})", of)
    if found is None:
        raise ValueError("write a sum or a product, such as 47*86")
    left, right = int(found[1]), int(found[3])
    return left + right if found[2] == "+" else left * right


class ProductGrader(Grader):
    """Reward 1 if the last answer is the true product, else 0. A call gets no reward itself."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, float(sample.text == ctx.label))
