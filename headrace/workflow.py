"""Workflows: user code that makes one attempt at a dataset row."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from headrace.agent_rewards import AgentRewards
from headrace.attempt_output import AttemptOutput
from headrace.http import post_json
from headrace.tools.loop import DEFAULT_TURNS, run_loop
from headrace.tools.tool_set import ToolSet, offered_tools
from headrace.turn_rewards import TurnRewards

ChatMessage = dict[str, object]
"""{"role": "system" | "user" | "assistant" | "tool", "content": "..."}, and `tool_calls` or
`tool_call_id` as in OpenAI's API."""

KEPT = ("tool_calls", "reasoning_content")
"""The other fields of an answer that are passed on, if it has them."""

Tools = ToolSet | Sequence[object]
"""A set of tools, or a list of functions. `chat` also takes dicts in OpenAI's form."""


@dataclass(frozen=True)
class WorkflowContext:
    """The input of a workflow. It never holds the row's ground truth.

    `base_url` and `api_key` belong to an OpenAI-compatible endpoint for this attempt only. `socket` is
    the unix socket that also leads there, which `chat` uses. `tools` are the tools of the workflow, and
    `max_turns` is how often the built-in loop asks the policy.
    """

    __headrace_context__: ClassVar[bool] = True

    prompt: list[ChatMessage]
    metadata: dict[str, object]
    base_url: str
    api_key: str
    socket: str | None = None
    tools: ToolSet = field(default_factory=ToolSet)
    max_turns: int = DEFAULT_TURNS
    turn_rewards: TurnRewards = field(default_factory=TurnRewards, repr=False, compare=False)
    agent_rewards: AgentRewards = field(default_factory=AgentRewards, repr=False, compare=False)

    def set_turn_reward(self, turn: int, value: float) -> None:
        """Set the reward of one turn: of the answer to the request with this number, 0 for the first
        request of the attempt. A later call for the same turn replaces the value. Runs that set
        `advanced.turn_reward_coef` learn from it, besides the reward of the grader. Raises TypeError
        and ValueError unless the turn is a number from 0 to 255 and the value a finite number from
        -1,000,000 to 1,000,000. Raises RuntimeError after the attempt."""
        self.turn_rewards.set(turn, value)

    def set_turn_agent(self, turn: int, agent: str) -> None:
        """Say which agent gave the answer to the request with this number, 0 for the first request of
        the attempt. Runs that set `advanced.agent_advantages` compare the answers of an agent with those
        of the same agent in other samples. Raises TypeError and ValueError unless the turn is a number
        from 0 to 255 and the agent a name. Raises RuntimeError after the attempt."""
        self.agent_rewards.set_turn(turn, agent)

    def set_agent_reward(self, agent: str, value: float) -> None:
        """Set the own reward of an agent, which is added to that of the grader for its answers. A later
        call for the same agent replaces the value. Raises TypeError and ValueError unless the agent is a
        name and the value a finite number from -1,000,000 to 1,000,000. Raises RuntimeError after the
        attempt."""
        self.agent_rewards.set_reward(agent, value)

    @cached_property
    def artifacts_dir(self) -> Path:
        """A directory for this attempt only. It is made at its first use and removed after the attempt.
        The files in it are kept with the sample, up to 32 files and 8 MiB. It is not made in advance,
        because most attempts need none, and removing one takes as long as everything else the SDK
        does."""
        return Path(tempfile.mkdtemp(prefix="sample-"))

    def discard(self, into: AttemptOutput | None = None) -> None:
        """Remove the directory of the attempt, if it has one. Its files are first kept in `into`."""
        if "artifacts_dir" in self.__dict__:
            if into is not None:
                into.collect(self.artifacts_dir)
            shutil.rmtree(self.artifacts_dir, ignore_errors=True)

    async def chat(
        self, messages: list[ChatMessage], *, tools: Tools = (), **options: object
    ) -> ChatMessage:
        """Ask the policy for the next assistant message, which has `tool_calls` if it calls `tools`.

        `options` are those of OpenAI's chat completions: `max_tokens`, and `stop`, which is one string
        or up to four. The answer ends before the first stop string. The run's own temperature and top_p
        are always used. Raises EndpointRefused, a RuntimeError, with the endpoint's message when the
        request is refused. The message names any option that the endpoint does not support.
        """
        body: dict[str, object] = {"model": "policy", "messages": messages, **options}
        if specs := _specs(tools):
            body["tools"] = specs
        url = f"{self.base_url}/chat/completions"
        answer = await post_json(url, body, key=self.api_key, socket=self.socket)
        choices = answer["choices"]
        if not isinstance(choices, list):
            raise TypeError(
                "the answer of the endpoint has no list `choices`; use ctx.base_url of this attempt"
            )
        message: ChatMessage = choices[0]["message"]
        answered: ChatMessage = {"role": message["role"], "content": message["content"] or ""}
        return answered | {key: message[key] for key in KEPT if message.get(key)}

    async def call_tools(self, reply: ChatMessage, tools: Tools | None = None) -> list[ChatMessage]:
        """Make the calls of an answer, and return the messages with their results. `tools` are those of
        the workflow by default. A call that fails has an error as its result, for the policy."""
        return await _tool_set(self.tools if tools is None else tools).answer(reply, context=self)

    async def loop(
        self,
        messages: list[ChatMessage] | None = None,
        *,
        tools: Tools | None = None,
        max_turns: int | None = None,
        **options: object,
    ) -> list[ChatMessage]:
        """Ask the policy and make its calls until it calls no tool, or `max_turns` answers were given.
        Returns the whole conversation. It begins with `messages`, which are `prompt` by default, and
        `options` are those of `chat`."""
        return await run_loop(
            self,
            self.prompt if messages is None else messages,
            tools=_tool_set(self.tools if tools is None else tools),
            max_turns=self.max_turns if max_turns is None else max_turns,
            options=options,
        )


def _tool_set(tools: Tools) -> ToolSet:
    return tools if isinstance(tools, ToolSet) else ToolSet(offered_tools(tools))


def _specs(tools: Tools) -> list[dict[str, object]]:
    """Tools in OpenAI's form."""
    if isinstance(tools, ToolSet):
        return tools.specs
    written = [one for one in tools if isinstance(one, dict)]
    return [*written, *_tool_set([one for one in tools if not isinstance(one, dict)]).specs]


class AgentWorkflow:
    """Subclass it once per entry point and write `run`, or set `tools`.

    `tools` is a list of functions that the policy may call. Without it, all functions of the entry point
    that are marked by `@tool` are offered. Methods of the class that are marked are always offered.
    `mcp` is a list of names of MCP servers of the workspace, whose tools are offered as well. Without
    it, all servers are used by a workflow without `run`, and none by others.
    """

    tools: ClassVar[Sequence[object] | None] = None
    mcp: ClassVar[Sequence[str] | None] = None

    async def run(self, ctx: WorkflowContext) -> list[ChatMessage] | None:
        """Make one attempt at `ctx.prompt`; return the conversation, ending with the answer. Without a
        `run` of its own, a workflow that has tools runs `ctx.loop()`."""
        if not ctx.tools:
            raise NotImplementedError(
                "write `async def run(self, ctx)`, or give the workflow tools"
            )
        await ctx.loop()
        return None
