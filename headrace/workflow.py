"""Workflows: how one attempt at a dataset row is made."""

from dataclasses import dataclass
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
    artifacts_dir: Path
    base_url: str
    api_key: str

    async def chat(self, messages: list[ChatMessage], **options: object) -> ChatMessage:
        """Ask the policy for the next assistant message.

        `options` are those of OpenAI's chat completions (`max_tokens`, `stop`). Raises RuntimeError
        with the endpoint's message when the request is refused.
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
