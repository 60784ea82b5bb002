"""A rollout of several turns whose workflow keeps only the end of each answer, as templates of models
that reason do. So each turn has a training row of its own, which begins like the one before."""

from typing import Any

from tests.kit.platform import Platform, run_config

TURNS = 5
MAIN = f"""
from headrace import AgentWorkflow, Grader

SYSTEM = "You count for somebody. Think as long as you want to; only your last letters are kept. " * 2


class Forgetful(AgentWorkflow):
    async def run(self, ctx):
        messages = [{{"role": "system", "content": SYSTEM}}, *ctx.prompt]
        for turn in range({TURNS}):
            reply = await ctx.chat(messages, max_tokens=24)
            kept = {{"role": "assistant", "content": reply["content"][-3:]}}
            messages += [kept, {{"role": "user", "content": f"And what comes {{turn}} after that?"}}]
        return messages[:-1]


class Count(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            answers = [one["content"] for one in sample.messages if one["role"] == "assistant"]
            digits = sum(character.isdigit() for character in "".join(answers))
            ctx.set_sample_reward(name, digits / 8)
"""
FILES = {
    "rollouts/forgetful/main.py": MAIN,
    "rollouts/forgetful/pyproject.toml": '[project]\nname = "forgetful"\nversion = "0"\n',
}


def forgetful_run(**advanced: object) -> dict[str, dict[str, Any]]:
    """A short deterministic run of that rollout."""
    return run_config(
        experiment={"rollout": "forgetful"},
        training={"max_prompt_length": 512, "max_response_length": 24 * TURNS},
        advanced=advanced,
    )


def tokens_of(started: Platform, run: str) -> tuple[float, float]:
    """The tokens of all rows of a run, and those that its learner computed."""
    samples = started.get(f"/runs/{run}/samples", limit=100)["samples"]
    assert {one["failure"] for one in samples} == {None}
    metrics = started.info(run)["metrics"]["train/tokens"]
    of_rows = sum(one["prompt_tokens"] + one["completion_tokens"] for one in samples)
    return of_rows, sum(point["value"] for point in metrics)
