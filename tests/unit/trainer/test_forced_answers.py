"""The unmodified `openai` package forces formats and calls: answers of the built-in engine follow them,
and the learner takes the logprobs that they were drawn with."""

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch

from infra.model_api.gateway.sessions import GatewaySession
from schemas.learner import GradedGroup, StepBatch
from schemas.sampling import ModelRef, SampleRecord, Turn, sequences_of
from tests.unit.trainer.support import job
from tests.unit.trainer.test_openai_parameters import HELLO, ai, ask, session
from trainer.engine import Engine

__all__ = ["ai", "session"]

SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sure", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("ask", "tell")
]


async def test_a_format_is_followed(ai: openai.AsyncOpenAI, session: GatewaySession) -> None:
    choice = await ask(ai, session, response_format=FORMAT)
    assert json.loads(choice.message.content) in ({"sure": True}, {"sure": False})
    assert choice.finish_reason == "stop"


async def test_a_required_call_is_a_call(ai: openai.AsyncOpenAI, session: GatewaySession) -> None:
    for wanted, names in (
        ("required", {"ask", "tell"}),
        ({"type": "function", "function": {"name": "tell"}}, {"tell"}),
    ):
        choice = await ask(ai, session, tools=TOOLS, tool_choice=wanted)
        (call,) = choice.message.tool_calls
        assert call.function.name in names
        assert list(json.loads(call.function.arguments)) == ["sure"]
        assert choice.finish_reason == "tool_calls"


async def test_a_stream_tells_a_forced_answer(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    stream: Any = await ai.chat.completions.create(
        model="m", messages=HELLO, response_format=FORMAT, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert list(json.loads("".join(pieces))) == ["sure"]
    assert len([piece for piece in pieces if piece]) > 3


async def test_a_schema_that_allows_nothing_is_refused_and_the_next_request_works(
    ai: openai.AsyncOpenAI, session: GatewaySession
) -> None:
    nothing = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}
    with pytest.raises(openai.BadRequestError, match="anyOf is empty; simplify the schema"):
        await ask(ai, session, response_format=nothing)
    await ask(ai, session, response_format=FORMAT)
    assert session.refusal is None


def group_of(turns: Sequence[Turn]) -> GradedGroup:
    samples = tuple(
        SampleRecord(index=n, sequences=sequences_of((turn,)), text=turn.text)
        for n, turn in enumerate(turns)
    )
    return GradedGroup(0, samples, tuple(float("true" in turn.text) for turn in turns))


async def step_on(
    engine: Engine, model: ModelRef, turns: Sequence[Turn], **advanced: Any
) -> dict[str, float]:
    learned = job(model, **{"deterministic": True, **advanced})
    await engine.learner.initialize(learned)
    batch = StepBatch(step=1, groups=(group_of(turns),))
    return (await engine.learner.step(learned, batch, export_state=False)).metrics


@pytest.mark.parametrize(
    "advanced",
    [
        {"kl_coef": 0.1},
        {"algorithm": "reinforce_plus_plus", "kl_coef": 0.1, "kl_in": "reward"},
        {"algorithm": "ppo"},
    ],
    ids=["kl in the loss", "kl in the reward", "critic"],
)
async def test_a_step_finds_no_mismatch_and_no_kl_before_the_update(
    engine: Engine, ai: openai.AsyncOpenAI, session: GatewaySession, advanced: dict[str, Any]
) -> None:
    """The logprobs of sampler, policy and reference are over the allowed tokens: they are equal before
    the first update, and the ratio is 1 everywhere. Over the whole vocabulary they would differ by the
    mass that the grammar forbids."""
    session.calls.clear()
    model = session.spec.template.model
    answer = await ai.chat.completions.create(
        model="m", messages=HELLO, response_format=FORMAT, n=6, logprobs=True
    )
    turns = [call.turn for call in session.calls if call.turn]
    assert len(turns) == len(answer.choices) == 6
    assert len({turn.text for turn in turns}) == 2
    metrics = await step_on(engine, model, turns, **advanced)
    assert metrics["train/sampler_mismatch"] < 1e-5
    assert abs(metrics["train/kl"]) < 1e-9
    assert metrics["train/entropy_loss"] < 0.1, "most tokens have no alternative"
    assert metrics["train/grad_norm"] > 0
    plain = [turn.model_copy(update={"grammar": None}) for turn in turns]
    without = await step_on(engine, model, plain)
    assert without["train/sampler_mismatch"] > 1
    assert torch.isfinite(torch.tensor(list(metrics.values()))).all()
