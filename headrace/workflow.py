"""Workflows: how one attempt at a dataset row is made."""

import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headrace.http import post_json

ChatMessage = dict[str, object]
"""{"role": "system" | "user" | "assistant" | "tool", "content": "..."}"""


@dataclass(frozen=True)
class WorkflowContext:
    """What a workflow is given. It never holds the row's ground truth.

    `base_url` and `api_key` open an OpenAI-compatible endpoint that is this attempt's own.
    """

    prompt: list[ChatMessage]
    metadata: dict[str, object]
    base_url: str
    api_key: str

    @cached_property
    def artifacts_dir(self) -> Path:
        """A directory of this attempt's own, made when it is first asked for and gone with the attempt.
        Most attempts need none, and to remove one takes as long as all else that the SDK does."""
        return Path(tempfile.mkdtemp(prefix="sample-"))

    def discard(self) -> None:
        """The attempt is over: remove its directory, if it has one."""
        if "artifacts_dir" in self.__dict__:
            shutil.rmtree(self.artifacts_dir, ignore_errors=True)

    async def chat(self, messages: list[ChatMessage], **options: object) -> ChatMessage:
        """Ask the policy for the next assistant message.

        `options` are those of OpenAI's chat completions: `max_tokens`, and `stop`, one string or up to
        four, before the first of which the answer ends. The run's own temperature and top_p always win.
        Raises RuntimeError with the endpoint's message when the request is refused; what the endpoint
        does not support it refuses by name.
        """
        body = {"model": "policy", "messages": messages, **options}
        answer = await post_json(f"{self.base_url}/chat/completions", body, key=self.api_key)
        choices = answer["choices"]
        if not isinstance(choices, list):
            raise TypeError("the endpoint answered without choices")
        message: ChatMessage = choices[0]["message"]
        return {"role": message["role"], "content": message["content"]}


class AgentWorkflow:
    """Subclass it once per entry point and write `run`."""

    async def run(self, ctx: WorkflowContext) -> list[ChatMessage] | None:
        """Make one attempt at `ctx.prompt`; return the conversation, ending with the answer."""
        raise NotImplementedError("write `async def run(self, ctx)`")
