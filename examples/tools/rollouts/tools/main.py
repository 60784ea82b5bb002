"""Let the model use a calculator, and reward a right product.

There is no AgentWorkflow, so the built-in loop makes the calls until the model answers.
"""

import re

from headrace import Grader, tool
from headrace.tools import ToolError


@tool
def calc(of: str) -> int:
    """Compute a sum or a product, such as 47*86.

    Args:
        of: two whole numbers with `+` or `*` between them
    """
    found = re.fullmatch(r"(\d{1,6})([+*])(\d{1,6})", of)
    if found is None:
        raise ToolError("write a sum or a product, such as 47*86")
    left, right = int(found[1]), int(found[3])
    return left + right if found[2] == "+" else left * right


class Check(Grader):
    """Reward 1 if the last answer is the true product, else 0. A call gets no reward itself."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, float(sample.text == ctx.label))
