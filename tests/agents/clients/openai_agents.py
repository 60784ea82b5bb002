"""The `openai-agents` package, over chat completions."""

import agents
import openai

agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def model_of(client: openai.AsyncOpenAI) -> agents.Model:
    return agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)


async def run(base_url: str, api_key: str, prompt: str, model_of=model_of) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = agents.Agent(
            name="adder", instructions="Be brief.", tools=[add], model=model_of(client)
        )
        try:
            result = await agents.Runner.run(agent, prompt, max_turns=4)
        except agents.exceptions.AgentsException:  # an unknown tool, or too many turns
            return ""
    return str(result.final_output)
