"""Workflows: user code that makes one attempt at a dataset row."""

import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.http import post_json

ChatMessage = dict[str, object]
"""{"role": "system" | "user" | "assistant" | "tool", "content": "..."}, and `tool_calls` or
`tool_call_id` as in OpenAI's API."""

KEPT = ("tool_calls", "reasoning_content")
"""The other fields of an answer that are passed on, if it has them."""


@dataclass(frozen=True)
class WorkflowContext:
    """The input of a workflow. It never holds the row's ground truth.

    `base_url` and `api_key` belong to an OpenAI-compatible endpoint for this attempt only. `socket` is
    the unix socket that also leads there, which `chat` uses.
    """

    prompt: list[ChatMessage]
    metadata: dict[str, object]
    base_url: str
    api_key: str
    socket: str | None = None

    @cached_property
    def artifacts_dir(self) -> Path:
        """A directory for this attempt only. It is made at its first use and removed after the attempt.
        It is not made in advance, because most attempts need none, and removing one takes as long as
        everything else the SDK does."""
        return Path(tempfile.mkdtemp(prefix="sample-"))

    def discard(self) -> None:
        """Remove the directory of the attempt, if it has one."""
        if "artifacts_dir" in self.__dict__:
            shutil.rmtree(self.artifacts_dir, ignore_errors=True)

    async def chat(self, messages: list[ChatMessage], **options: object) -> ChatMessage:
        """Ask the policy for the next assistant message.

        `options` are those of OpenAI's chat completions: `tools`, `max_tokens`, and `stop`, which is one
        string or up to four. The answer ends before the first stop string. It has `tool_calls` if the
        policy calls tools. The run's own temperature and top_p are always used. Raises RuntimeError with
        the endpoint's message when the request is refused. The message names any option that the
        endpoint does not support.
        """
        body = {"model": "policy", "messages": messages, **options}
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


class AgentWorkflow:
    """Subclass it once per entry point and write `run`."""

    async def run(self, ctx: WorkflowContext) -> list[ChatMessage] | None:
        """Make one attempt at `ctx.prompt`; return the conversation, ending with the answer."""
        raise NotImplementedError("write `async def run(self, ctx)`")
