"""Conversations with tools, from the engine through the endpoint to the learner.

Whatever a framework does with a history, the ids that are trained are the ids that were sampled, each
once and nothing else, and the learner computes the logprobs that they were sampled with.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.model_api.gateway.sessions import GatewaySession
from infra.model_api.wire.request import ModelRequest
from schemas.sampling import (
    Message,
    PolicyRef,
    SamplingParams,
    ToolCall,
    ToolSpec,
    Turn,
    sequences_of,
)
from schemas.sampling import Sequence as Row
from tests.kit.property_examples import examples
from tests.kit.specs import group_spec, template
from tests.unit.trainer.support import TINY, Shelf, job
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.model.lora_names import Scaling
from trainer.policy import Policy, export, fresh_policy

AGREES = 1e-6
ALPHA = 8.0
TEXTS = st.text(max_size=6) | st.sampled_from(["", "é\u2028", "\N{GRINNING FACE}", "<|tool|>", " "])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["continue", "branch", "edit", "shorten", "tools", "result"]),
        TEXTS,
    ),
    min_size=1,
    max_size=5,
)
TOOLS = (ToolSpec(name="add", parameters='{"properties": {"a": {}}}'),)


class World:
    """An engine with a version whose adapter changes the model, and the learner's policy for it."""

    def __init__(
        self, runner: asyncio.Runner, engine: Engine, policy: Policy, version: PolicyRef
    ) -> None:
        self.runner, self.engine = runner, engine
        self.policy, self.version = policy, version

    def __repr__(self) -> str:
        return "World()"

    def turn(self, session: GatewaySession, messages: Sequence[Message], *, tools: bool) -> Turn:
        """Sample and record an answer as the gateway does."""
        wanted = ModelRequest(messages=tuple(messages), tools=TOOLS if tools else ())
        [(call, request)] = session.ask(wanted)
        return session.answer(call, self.runner.run(self.engine.sampler.sample(request)))

    @torch.no_grad()
    def largest_difference(self, rows: Sequence[Row], *, temperature: float) -> float:
        """The largest distance of the learner's logprobs from the recorded ones."""
        examples = [Example(i, row) for i, row in enumerate(rows)]
        device = self.policy.loaded.base.model.device
        shares = self.policy.shares_prompts
        micros = pack(examples, micro_batch_tokens=4096, share=shares, device=device)
        return max(
            float((self.policy.logprobs(m, temperature=temperature)[0] - m.behaviour_M).abs().max())
            for m in micros
        )


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with asyncio.Runner() as runner:
        shelf = Shelf()
        engine = Engine(fetch=shelf.fetch, threads=1)
        loaded = runner.run(engine.learner._cache.load_model(TINY))
        fresh, generator = fresh_policy(loaded, job()), torch.Generator().manual_seed(1)
        tensors = {
            name: tensor.detach() + 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor)
            for name, tensor in fresh.tensors.items()
        }
        version = PolicyRef(version=1, weights=shelf.put(export(tensors)))
        yield World(runner, engine, Policy(loaded, tensors, Scaling(ALPHA)), version)
        runner.run(engine.aclose())


def opened(world: World, params: SamplingParams) -> GatewaySession:
    asked = template().model_copy(
        update={"model": TINY, "policy": world.version, "lora_alpha": ALPHA, "params": params}
    )
    return GatewaySession(group_spec(asked), 0, "/v1/samples/s", "key", 600.0)


def resent(message: Message) -> Message:
    """An answer as a framework sends it back."""
    calls = tuple(c.model_copy(update={"id": f"new_{c.id}"}) for c in message.tool_calls)
    return message.model_copy(update={"reasoning": None, "tool_calls": calls})


@examples(30)
@given(
    steps=STEPS,
    temperature=st.sampled_from([1.0, 0.7]),
    deterministic=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sampled_tokens_are_the_trained_ones(
    world: World,
    *,
    steps: list[tuple[str, str]],
    temperature: float,
    deterministic: bool,
    seed: int,
) -> None:
    params = SamplingParams(
        max_new_tokens=12, temperature=temperature, deterministic=deterministic, seed=seed
    )
    session = opened(world, params)
    history: list[Message] = []
    sampled: list[Turn] = []
    for what, text in steps:
        if what == "branch":
            history = history[:-2]
        elif what == "shorten":
            history = history[1:]
        elif what == "edit" and history:
            history[-1] = history[-1].model_copy(update={"content": f"edited {text}"})
        if what == "result" and history:
            history.append(Message(role="tool", content=text, tool_call_id="call_0"))
        else:
            history.append(Message(role="user", content=text))
        sampled.append(world.turn(session, history, tools=what in ("tools", "result")))
        history.append(resent(sampled[-1].message))
    turns, _ = session.close()
    assert turns == tuple(sampled)
    rows = sequences_of(turns)
    trained = Counter(
        (token, logprob)
        for row in rows
        for token, logprob, own in zip(row.tokens, row.logprobs, row.loss_mask, strict=True)
        if own
    )
    assert trained == Counter(
        pair for turn in turns for pair in zip(turn.completion_ids, turn.logprobs, strict=True)
    )
    assert world.largest_difference(rows, temperature=temperature) <= AGREES


SUMS = [[Message(role="user", content=text)] for text in ("1+2?", "3+4?")]


def called(number: int) -> list[Message]:
    """A conversation with a call whose id no template shows."""
    call = ToolCall(id=f"random_{number}", name="add", arguments='{"a": 1}')
    said = Message(role="assistant", content="", tool_calls=(call,))
    return [*SUMS[0], said, Message(role="tool", content="3", tool_call_id=call.id)]


def at_once(world: World, talks: Sequence[Sequence[Message]]) -> list[tuple[int, ...]]:
    """The completions of requests that are all open before the first is answered."""
    session = opened(world, SamplingParams(max_new_tokens=12))
    asked = [session.ask(ModelRequest(messages=tuple(talk)))[0] for talk in talks]

    async def sampled() -> list[Turn]:
        return await asyncio.gather(*(world.engine.sampler.sample(one) for _, one in asked))

    return [turn.completion_ids for turn in world.runner.run(sampled())]


@pytest.mark.parametrize("talks", [[SUMS[0]] * 4, [called(number) for number in range(4)]])
def test_equal_prompts_at_once_draw_different_tokens(
    world: World, talks: list[list[Message]]
) -> None:
    drawn = at_once(world, talks)
    assert len(set(drawn)) == 4
    assert at_once(world, talks) == drawn, "an attempt that is repeated draws the same"


def test_other_prompts_do_not_change_what_a_prompt_draws(world: World) -> None:
    one, two = SUMS
    alone = at_once(world, [one, one, one])
    assert at_once(world, [two, one, two, one, one])[1::2] == alone[:2]
    assert at_once(world, [two, two, one, one, one])[2:] == alone


def test_a_request_that_was_refused_does_not_leave_its_draws_to_another(world: World) -> None:
    session = opened(world, SamplingParams(max_new_tokens=12))
    gone, kept = (session.ask(ModelRequest(messages=tuple(SUMS[0])))[0] for _ in range(2))
    session.refuse(gone[0])
    again = world.turn(session, SUMS[0], tools=False)
    other = world.runner.run(world.engine.sampler.sample(kept[1]))
    assert again.completion_ids != other.completion_ids


def test_twin_ids_that_were_rendered_again_do_not_agree(world: World) -> None:
    """Twin: a context that was not the sampled one has other logprobs."""
    session = opened(world, SamplingParams(max_new_tokens=12))
    turn = world.turn(session, [Message(role="user", content="1+2?")], tools=True)
    [row] = sequences_of((turn,))
    assert world.largest_difference([row], temperature=1.0) <= AGREES
    ids = (row.tokens[0], row.tokens[1] + 1, *row.tokens[2:])
    other = row.model_copy(update={"tokens": ids})
    assert world.largest_difference([other], temperature=1.0) > 1e-4
