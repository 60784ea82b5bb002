"""The model answers, checks its own answer once, and may correct it."""

import re

from headrace import AgentWorkflow, Grader

CHECK = {"role": "user", "content": "Check your answer. Then write the final number."}


class SolveTwice(AgentWorkflow):
    """Two turns. The tokens of both are trained, and the grader sees the last answer."""

    async def run(self, ctx):
        first = await ctx.chat(ctx.prompt)
        messages = [*ctx.prompt, first, CHECK]
        second = await ctx.chat(messages)
        return [*messages, second]


class Check(Grader):
    """Reward 1 if the last number of the final answer is the row's ground truth, else 0."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            numbers = re.findall(r"-?\d+", sample.text)
            ctx.set_sample_reward(name, float(numbers[-1:] == [ctx.label]))
