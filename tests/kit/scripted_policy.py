"""A policy for tests of wire formats: it answers with the messages of a script, token for token."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from infra.model_api.gateway.server import HttpGateway
from infra.model_api.gateway.sessions import GatewaySession
from schemas.sampling import Message, SampleRequest, ToolCall, Turn
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.specs import GroupSpec
from tests.kit.sockets import relayed
from tests.kit.specs import group_spec, template


def said(content: str = "", *, reasoning: str | None = None, **calls: str) -> Message:
    """An answer with a call for each keyword: the tool's name and its arguments."""
    made = tuple(
        ToolCall(id=f"made_{name}", name=name, arguments=text) for name, text in calls.items()
    )
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)


@dataclass
class ScriptedPolicy:
    """`schemas.sampling.Sampler` whose answers are `script`, and the last one again when it ends. It
    continues exact ids as an engine does. Ids are code points of the JSON of messages."""

    script: Sequence[Message]
    finish: str = "stop"
    error: Exception | None = None
    slow_s: float = 0.0
    asked: list[SampleRequest] = field(default_factory=list)

    async def prepare(self, request: SampleRequest) -> None:
        pass

    async def sample(self, request: SampleRequest) -> Turn:
        number = len(self.asked)
        self.asked.append(request)
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if self.error is not None:
            raise self.error
        answer = self.script[min(number, len(self.script) - 1)]
        ids = tuple(map(ord, answer.model_dump_json()))
        return Turn(
            prompt_ids=self._prompt(request),
            completion_ids=ids,
            logprobs=(-0.5,) * len(ids),
            text=answer.content,
            finish_reason="length" if self.finish == "length" else "stop",
            answer=answer,
        )

    def _prompt(self, request: SampleRequest) -> tuple[int, ...]:
        num = len(request.history_messages)
        if request.history_messages and request.messages[:num] == request.history_messages:
            last = request.history[-1]
            assert request.messages[num] == last.message, "the recorded answer is in its place"
            return (*last.prompt_ids, *last.completion_ids, *_ids(request.messages[num + 1 :]))
        tools = "".join(tool.model_dump_json() for tool in request.tools)
        return (*map(ord, tools), *_ids(request.messages))


def _ids(messages: Sequence[Message]) -> tuple[int, ...]:
    return tuple(map(ord, "".join(message.model_dump_json() for message in messages)))


@asynccontextmanager
async def open_sample(
    policy: ScriptedPolicy, *, spec: GroupSpec | None = None, masks: Masks = NO_MASKS
) -> AsyncIterator[tuple[str, GatewaySession]]:
    """A gateway over this policy, with one sample: its URL, and its session."""
    gateway = HttpGateway(policy)
    await gateway.start()
    session = gateway.open(spec or group_spec(template()), 0, deadline_s=30, masks=masks)
    try:
        async with relayed(await gateway.open_socket("r1")) as host:
            yield f"{host}{session.base_path}", session
    finally:
        await gateway.aclose()
