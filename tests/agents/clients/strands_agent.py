"""The package `strands-agents`, whose models stream."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


async def run(base_url: str, api_key: str, prompt: str) -> str:
    model = OpenAIModel(client_args={"base_url": base_url, "api_key": api_key}, model_id="policy")
    agent = Agent(model=model, tools=[add], callback_handler=None)
    result = await agent.invoke_async(prompt)
    return str(result)
