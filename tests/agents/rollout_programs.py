"""Rollouts as their authors write them for the package `osmosis-ai`, unmodified."""

SERVE = """

def main():
    app = create_rollout_server(backend=LocalBackend(workflow=Multiply, grader=Exact))
    uvicorn.run(app, host="0.0.0.0", port=int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000")))


if __name__ == "__main__":
    main()
"""

GRADER = """

class Exact(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        said = re.findall(r"#### *(-?[0-9.]+)", json.dumps(ctx.sample.messages))
        ctx.set_reward(1.0 if said and float(said[-1]) == float(ctx.label) else 0.0)
"""

STRANDS = (
    '''
import json
import os
import re

import uvicorn
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.integrations.agents.strands import OsmosisRolloutModel, OsmosisStrandsAgent
from osmosis_ai.rollout.server import create_rollout_server
from strands import tool


@tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Multiply(AgentWorkflow):
    async def run(self, ctx: AgentWorkflowContext) -> None:
        model = OsmosisRolloutModel(params={"temperature": 1.0, "max_tokens": 16384})
        agent = OsmosisStrandsAgent(
            model=model, tools=[multiply], messages=ctx.prompt, callback_handler=None
        )
        await agent.invoke_async()
'''
    + GRADER
    + SERVE
)

OPENAI_AGENTS = (
    '''
import json
import os
import re

import uvicorn
from agents import ModelSettings, Runner, function_tool
from osmosis_ai.rollout.agent_workflow import AgentWorkflow
from osmosis_ai.rollout.backend.local import LocalBackend
from osmosis_ai.rollout.context import AgentWorkflowContext, GraderContext
from osmosis_ai.rollout.grader import Grader
from osmosis_ai.rollout.integrations.agents.openai_agents import (
    OsmosisAgent,
    OsmosisMemorySession,
    OsmosisRolloutModel,
)
from osmosis_ai.rollout.server import create_rollout_server


@function_tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


class Multiply(AgentWorkflow):
    async def run(self, ctx: AgentWorkflowContext) -> None:
        agent = OsmosisAgent(
            name="multiplier",
            model=OsmosisRolloutModel(),
            model_settings=ModelSettings(temperature=1.0, max_tokens=4096),
            tools=[multiply],
        )
        await Runner.run(agent, ctx.prompt, session=OsmosisMemorySession())
'''
    + GRADER
    + SERVE
)

OLDER_GRADER = """

class Exact(Grader):
    async def grade(self, ctx: GraderContext) -> None:
        for name, sample in ctx.get_samples().items():
            said = re.findall(r"#### *(-?[0-9.]+)", json.dumps(sample.messages))
            reward = 1.0 if said and float(said[-1]) == float(ctx.label) else 0.0
            ctx.set_sample_reward(name, reward)
"""

OLDER_STRANDS = STRANDS.replace(GRADER, OLDER_GRADER)
OLDER_OPENAI_AGENTS = OPENAI_AGENTS.replace(GRADER, OLDER_GRADER).replace(
    "OsmosisMemorySession()", 'OsmosisMemorySession("multiplier")'
)

VERIFIERS_V1 = '''
import re

import verifiers.v1 as vf

__all__ = ["MultiplyTaskset"]


class MultiplyData(vf.TaskData):
    answer: float


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def multiply(self, a: float, b: float) -> float:
        """Multiply two numbers."""
        return a * b


class MultiplyTask(vf.Task[MultiplyData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        said = re.findall(r"#### *(-?[0-9.]+)", trace.last_reply)
        return float(bool(said) and float(said[-1]) == self.data.answer)


class MultiplyConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class MultiplyTaskset(vf.Taskset[MultiplyTask, MultiplyConfig]):
    @classmethod
    def toolsets(cls, config: MultiplyConfig) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    def load(self) -> list[MultiplyTask]:
        return [
            MultiplyTask(MultiplyData(prompt=f"{a} * 7?", answer=7.0 * a), self.config.task)
            for a in range(6, 10)
        ]


if __name__ == "__main__":
    Calculator.run()
'''

VERIFIERS_V0 = '''
import re

import verifiers as vf
from datasets import Dataset


def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def exact(completion, answer, **kwargs) -> float:
    said = re.findall(r"#### *(-?[0-9.]+)", str(completion[-1]["content"]))
    return float(bool(said) and float(said[-1]) == float(answer))


def load_environment(first: int = 6) -> vf.Environment:
    rows = [{"question": f"{a} * 7?", "answer": str(7 * a)} for a in range(first, first + 4)]
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[multiply], rubric=vf.Rubric(funcs=[exact])
    )
'''

OPENENV = """
import threading

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from verifiers.v1.tasksets.openenv import OpenEnvEnv, OpenEnvTaskset

__all__ = ["OpenEnvEnv", "OpenEnvTaskset"]


class Say(Action):
    text: str


class Heard(Observation):
    question: str = ""


class Multiply(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="one", step_count=0)

    def reset(self, seed=None, episode_id=None, **arguments):
        return Heard(question="6 * 7?", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **arguments):
        return Heard(question="", done=True, reward=float("42" in action.text))

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Multiply, Say, Heard, max_concurrent_envs=64)
server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=NUMBER, log_level="warning"))
threading.Thread(target=server.run, daemon=True).start()
"""
OPENENV_SETTINGS = '[tool.headrace.environment.taskset]\nbase_url = "http://127.0.0.1:NUMBER"\n'
OPENENV_TASK: dict[str, object] = {
    "name": "one",
    "prompt": None,
    "env": None,
    "base_url": "http://127.0.0.1:NUMBER",
    "use_docker": False,
    "provider_kwargs": {},
    "reset": {},
}
