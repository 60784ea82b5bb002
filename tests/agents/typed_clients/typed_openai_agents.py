"""The `openai-agents` package with an `output_type`."""

import agents
import openai
from pydantic import BaseModel

agents.set_tracing_disabled(True)


class Verdict(BaseModel):
    sure: bool
    number: int


async def run(base_url: str, api_key: str, prompt: str) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
        agent = agents.Agent(name="judge", model=model, output_type=Verdict)
        result = await agents.Runner.run(agent, prompt, max_turns=2)
    return result.final_output_as(Verdict, raise_if_incorrect_type=True).model_dump_json()
