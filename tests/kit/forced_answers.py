"""A rollout whose workflow forces a format, then a call of a tool, and the run that trains on it."""

from typing import Any

from tests.kit.platform import run_config

MAIN = '''
import json

from headrace import AgentWorkflow, Grader

SURE = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sure", "schema": SURE}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SURE}} for name in ("ask", "tell")
]


class Forced(AgentWorkflow):
    async def run(self, ctx):
        first = await ctx.chat(ctx.prompt, response_format=FORMAT)
        asked = [*ctx.prompt, first, {"role": "user", "content": "go on"}]
        second = await ctx.chat(asked, tools=TOOLS, tool_choice="required")
        return [*asked, second]


class Sure(Grader):
    """Both answers are valid, or grading fails."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            answers = [one for one in sample.messages if one["role"] == "assistant"]
            (call,) = answers[1]["tool_calls"]
            texts = (answers[0]["content"], call["function"]["arguments"])
            ctx.set_sample_reward(name, float(sum(json.loads(text)["sure"] for text in texts)))
'''
FILES = {
    "rollouts/forced/main.py": MAIN,
    "rollouts/forced/pyproject.toml": '[project]\nname = "forced"\nversion = "0"\n',
}


def forced_run(**advanced: object) -> dict[str, dict[str, Any]]:
    """A short deterministic run of that rollout."""
    return run_config(
        experiment={"rollout": "forced"},
        training={"max_prompt_length": 256, "max_response_length": 80},
        advanced=advanced,
    )
