"""The `openai-agents` package, over the Responses API, streaming."""

import agents
import openai
from openai_agents import add


async def run(base_url: str, api_key: str, prompt: str) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
        agent = agents.Agent(name="adder", instructions="Be brief.", tools=[add], model=model)
        result = agents.Runner.run_streamed(agent, prompt, max_turns=4)
        try:
            async for _event in result.stream_events():
                pass
        except agents.exceptions.AgentsException:  # an unknown tool, or too many turns
            return ""
    return str(result.final_output)
