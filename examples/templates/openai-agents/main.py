"""An agent of the OpenAI Agents SDK, with a tool."""

import re

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from headrace import AgentWorkflow, Grader

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


class Solve(AgentWorkflow):
    """The agent speaks to the policy by the endpoint of its own attempt. What it asked and got there is
    the sample, so nothing is returned."""

    async def run(self, ctx):
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
            agent = Agent(
                name="calculator",
                instructions="Answer with a number. Use the tool to multiply.",
                model=model,
                tools=[multiply],
            )
            await Runner.run(agent, ctx.prompt, max_turns=4)


class Check(Grader):
    """Reward 1 if the last number of the answer is the row's ground truth, else 0."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            numbers = re.findall(r"-?\d+", sample.text)
            ctx.set_sample_reward(name, float(numbers[-1:] == [ctx.label]))
