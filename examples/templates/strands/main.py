"""An agent of the Strands SDK, with a tool."""

import re

from strands import Agent, tool
from strands.models.openai import OpenAIModel

from headrace import AgentWorkflow, Grader


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Solve(AgentWorkflow):
    """The agent speaks to the policy by the endpoint of its own attempt. What it asked and got there is
    the sample, so nothing is returned."""

    async def run(self, ctx):
        model = OpenAIModel(
            client_args={"base_url": ctx.base_url, "api_key": ctx.api_key}, model_id="policy"
        )
        agent = Agent(
            model=model,
            tools=[multiply],
            system_prompt="Answer with a number. Use the tool to multiply.",
            callback_handler=None,
        )
        await agent.invoke_async(ctx.prompt[-1]["content"])


class Check(Grader):
    """Reward 1 if the last number of the answer is the row's ground truth, else 0."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            numbers = re.findall(r"-?\d+", sample.text)
            ctx.set_sample_reward(name, float(numbers[-1:] == [ctx.label]))
