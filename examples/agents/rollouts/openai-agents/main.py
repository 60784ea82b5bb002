"""An agent of the OpenAI Agents SDK multiplies with a calculator."""

import agents
import openai
from shared.products import ProductGrader, calculate

from headrace import AgentWorkflow

agents.set_tracing_disabled(True)


@agents.function_tool
def calc(of: str) -> int:
    """Compute a sum or a product, such as 47*86."""
    return calculate(of)


class Multiply(AgentWorkflow):
    """The agent speaks to the policy. What it asked and got is the sample, so nothing is returned."""

    async def run(self, ctx):
        async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
            agent = agents.Agent(name="multiplier", model=model, tools=[calc])
            try:
                await agents.Runner.run(agent, ctx.prompt, max_turns=3)
            except agents.exceptions.AgentsException as error:
                print(f"the agent gave up: {error}")  # what it did until then is the sample


class Check(ProductGrader):
    """The grader of both agents."""
