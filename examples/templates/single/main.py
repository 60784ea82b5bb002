"""One question, one answer."""

import re

from headrace import AgentWorkflow, Grader


class Solve(AgentWorkflow):
    """Send the row's prompt to the model. Its reply is the sample."""

    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        return [*ctx.prompt, reply]


class Check(Grader):
    """Reward 1 if the last number of the answer is the row's ground truth, else 0."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            numbers = re.findall(r"-?\d+", sample.text)
            ctx.set_sample_reward(name, float(numbers[-1:] == [ctx.label]))
