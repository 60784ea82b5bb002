"""The model may call a calculator before it answers."""

import re

from headrace import AgentWorkflow, Grader, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Solve(AgentWorkflow):
    """A workflow with tools needs no `run`: the built-in loop makes the calls of the model until it
    answers without a call."""

    tools = [multiply]


class Check(Grader):
    """Reward 1 if the last number of the answer is the row's ground truth, else 0."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            numbers = re.findall(r"-?\d+", sample.text)
            ctx.set_sample_reward(name, float(numbers[-1:] == [ctx.label]))
