"""The package `smolagents`, whose agent requires a call in each of its steps."""

import asyncio
import json

from smolagents import OpenAIModel, Tool, ToolCallingAgent


class Verdict(Tool):
    name = "final_answer"
    description = "Ends with a verdict."
    inputs = {
        "sure": {"type": "boolean", "description": "?"},
        "number": {"type": "integer", "description": "?"},
    }
    output_type = "string"

    def forward(self, sure: bool, number: int) -> str:
        return json.dumps({"sure": sure, "number": number})


def attempt(base_url: str, api_key: str, prompt: str) -> str:
    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[Verdict()], model=model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Be brief."
    return str(agent.run(prompt))


async def run(base_url: str, api_key: str, prompt: str) -> str:
    return await asyncio.to_thread(attempt, base_url, api_key, prompt)
