"""An agent of the Strands SDK multiplies with a calculator."""

import strands
from shared.products import ProductGrader, calculate
from strands.models.openai import OpenAIModel

from headrace import AgentWorkflow


@strands.tool
def calc(of: str) -> int:
    """Compute a sum or a product, such as 47*86."""
    return calculate(of)


class Multiply(AgentWorkflow):
    """The agent speaks to the policy. What it asked and got is the sample, so nothing is returned."""

    async def run(self, ctx):
        arguments = {"base_url": ctx.base_url, "api_key": ctx.api_key}
        model = OpenAIModel(client_args=arguments, model_id="policy")
        agent = strands.Agent(model=model, tools=[calc], callback_handler=None)
        await agent.invoke_async(ctx.prompt[-1]["content"])


class Check(ProductGrader):
    """The grader of both agents."""
