"""The package `pydantic-ai` with an `output_type`, which it makes a forced call of a tool."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Verdict(BaseModel):
    sure: bool
    number: int


async def run(base_url: str, api_key: str, prompt: str) -> str:
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    agent = Agent(OpenAIChatModel("policy", provider=provider), output_type=Verdict)
    result = await agent.run(prompt)
    return result.output.model_dump_json()
