"""Ask the model for a sum, and pay for a right answer."""

from headrace import AgentWorkflow, Grader


class Solve(AgentWorkflow):
    """One turn: the question goes to the model, its reply is the sample."""

    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        return [*ctx.prompt, reply]


class Check(Grader):
    """1 if what stands after the last `=`, up to the answer's end, is the true sum, else 0.

    The working before it earns nothing: which habit leads to the right sum is for the model to find.
    """

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            _, equals, answer = sample.text.rpartition("=")
            ctx.set_sample_reward(name, float(bool(equals) and answer == ctx.label))
