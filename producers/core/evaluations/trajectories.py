"""Trajectories in the Agent Trajectory Interchange Format (ATIF), as the messages of a sample."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from producers.core.datasets.strict_json import loads
from producers.core.evaluations.import_request import refuse
from schemas.sampling import Message, ToolCall


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class _Content(_Part):
    type: str
    text: str | None = None


class _Call(_Part):
    tool_call_id: str
    function_name: str
    arguments: dict[str, JsonValue]


class _Result(_Part):
    source_call_id: str | None = None
    content: str | tuple[_Content, ...] | None = None


class _Observation(_Part):
    results: tuple[_Result, ...]


class _Step(_Part):
    source: Literal["system", "user", "agent"]
    message: str | tuple[_Content, ...]
    reasoning_content: str | None = None
    tool_calls: tuple[_Call, ...] | None = None
    observation: _Observation | None = None


class _Totals(_Part):
    total_prompt_tokens: int | None = Field(default=None, ge=0, lt=1 << 53)
    total_completion_tokens: int | None = Field(default=None, ge=0, lt=1 << 53)


class AtifTrajectory(_Part):
    """A conversation of an attempt, with its tokens as far as they are known."""

    session_id: str | None = None
    trajectory_id: str | None = None
    steps: tuple[_Step, ...] = Field(min_length=1)
    final_metrics: _Totals | None = None
    extra: dict[str, Any] | None = None

    @classmethod
    def parse(cls, data: bytes, path: str) -> "AtifTrajectory":
        """The trajectory in a file. Raises InvalidConfig, which names the file by its path."""
        try:
            return cls.model_validate(loads(data.decode()))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise refuse(path, f"is not a trajectory: {place} {first['msg']}") from error
        except (ValueError, RecursionError) as error:
            raise refuse(path, f"is not valid JSON: {str(error)[:200]}") from error

    @property
    def attempt(self) -> str | None:
        """The id of its attempt."""
        named = self._own.get("rollout_id")
        if isinstance(named, str) and named:
            return named
        prefix, slash, _ = (self.trajectory_id or "").partition("/")
        return self.session_id or (prefix if slash else None)

    @property
    def place(self) -> tuple[object, object]:
        """The row and the attempt that it says it is of."""
        fields = self._own.get("request_extra_fields")
        found = fields if isinstance(fields, dict) else {}
        return found.get("row_index"), found.get("run_index")

    @property
    def _own(self) -> dict[str, Any]:
        own = (self.extra or {}).get("osmosis")
        return own if isinstance(own, dict) else {}

    @property
    def prompt_tokens(self) -> int:
        return (self.final_metrics and self.final_metrics.total_prompt_tokens) or 0

    @property
    def completion_tokens(self) -> int:
        return (self.final_metrics and self.final_metrics.total_completion_tokens) or 0

    @property
    def num_turns(self) -> int:
        return sum(step.source == "agent" for step in self.steps)

    def messages(self) -> tuple[Message, ...]:
        """Its steps as chat messages. A picture is named instead of shown."""
        found: list[Message] = []
        for step in self.steps:
            if step.source != "agent":
                found.append(Message(role=step.source, content=_text(step.message)))
            else:
                found.append(_answer(step))
            for result in step.observation.results if step.observation else ():
                content, call = _text(result.content or ""), result.source_call_id
                found.append(Message(role="tool", content=content, tool_call_id=call))
        return tuple(found)


def _answer(step: _Step) -> Message:
    calls = tuple(
        ToolCall(
            id=call.tool_call_id,
            name=call.function_name,
            arguments=json.dumps(call.arguments, ensure_ascii=False),
        )
        for call in step.tool_calls or ()
    )
    reasoning = step.reasoning_content or None
    return Message(
        role="assistant", content=_text(step.message), reasoning=reasoning, tool_calls=calls
    )


def _text(content: str | tuple[_Content, ...]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if part.text is not None else f"[{part.type}]" for part in content)
