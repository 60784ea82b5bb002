"""Ask the model for a sum, and reward a right answer."""

from headrace import AgentWorkflow, Grader


class Solve(AgentWorkflow):
    """One turn: send the question to the model; its reply is the sample."""

    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        return [*ctx.prompt, reply]


class Check(Grader):
    """Reward 1 if the text after the last `=` is the true sum, else 0.

    The working before it gets no reward, so the model has to find the habit that leads to the right sum.
    """

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            _, equals, answer = sample.text.rpartition("=")
            ctx.set_sample_reward(name, float(bool(equals) and answer == ctx.label))
