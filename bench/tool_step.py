"""The cost of tools: a step whose samples call one tool each, compared with a step of the same tokens.

Both workflows ask the policy twice, and send the same messages, so they sample the same tokens. One
calls a tool between the two turns, and the other has the result already. The whole platform runs, 4
prompts x 8 samples, alternating A B B A. `python -m bench.tool_step [--steps N]` prints the median
seconds of a step on each side, and their ratio.
"""

import argparse
import asyncio
import os
import statistics

from bench.b2_tax import GROUPS, MODEL, PROMPTS, SAMPLES, step_seconds
from bench.inside import inside

CALL = """
import json

from headrace import AgentWorkflow, Grader, tool


@tool
def add(left: int, right: int) -> int:
    return left + right


ASKED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c", "function": {"name": "add", "arguments": json.dumps({"left": 2, "right": 3})}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c", "name": "add", "content": "5"}


class Call(AgentWorkflow):
    async def run(self, ctx):
        await ctx.chat(ctx.prompt, tools=ctx.tools)
        results = await ctx.call_tools(ASKED)
        assert results == [RESULT]
        await ctx.chat([*ctx.prompt, ASKED, *results], tools=ctx.tools)


class Check(Grader):
    async def grade(self, ctx):
        for sample in ctx.samples.values():
            digits = sum(character.isdigit() for character in sample.text)
            ctx.set_sample_reward(sample.name, digits / 8)
"""
FILES = {
    "rollouts/call/main.py": CALL,
    "rollouts/plain/main.py": CALL.replace("await ctx.call_tools(ASKED)", "[RESULT]"),
}


def config(rollout: str, *, steps: int, tokens: int) -> dict[str, object]:
    return {
        "experiment": {
            "rollout": rollout,
            "entrypoint": "main.py",
            "model_path": "scratch:qwen3-4m",
            "dataset": "bench",
        },
        "training": {
            "lr": 1e-4,
            "n_samples_per_prompt": SAMPLES,
            "rollout_batch_size": GROUPS,
            "max_prompt_length": 256,
            "max_response_length": 2 * tokens,
            "max_answer_length": tokens,
        },
        "checkpoints": {"checkpoint_save_freq": 1_000_000},
        "advanced": {"max_steps": steps, "seed": 1},
    }


async def main(steps: int, tokens: int) -> None:
    seconds: dict[str, list[float]] = {"call": [], "plain": []}
    async with inside(FILES) as box:
        dataset = await box.dataset(PROMPTS)
        for side in ("call", "plain"):
            await box.run(config(side, steps=2, tokens=tokens), MODEL, dataset)
        for side in ("call", "plain", "plain", "call"):
            events = await box.run(config(side, steps=steps, tokens=tokens), MODEL, dataset)
            assert events[-1].event.type == "rl.run.finished", events[-1].event
            seconds[side] += step_seconds(events)
    call, plain = statistics.median(seconds["call"]), statistics.median(seconds["plain"])
    print(f"{GROUPS} x {SAMPLES} samples, two turns of up to {tokens} tokens, {steps} steps a run")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"with a call {call:.3f} s/step   without {plain:.3f} s/step   ratio {call / plain:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16)
    given = parser.parse_args()
    asyncio.run(main(given.steps, given.tokens))
