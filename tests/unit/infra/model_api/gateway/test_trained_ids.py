"""Whatever a framework does with a history, each sampled id is trained once, and nothing else is."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from infra.model_api.gateway.sessions import GatewaySession
from infra.model_api.wire.request import ModelRequest
from schemas.sampling import Message, ToolSpec, sequences_of
from tests.kit.property_examples import examples
from tests.kit.scripted_policy import ScriptedPolicy, said
from tests.kit.specs import group_spec, template

TEXTS = st.text(max_size=8)
STEPS = st.lists(
    st.tuples(st.sampled_from(["continue", "branch", "edit", "shorten", "tools"]), TEXTS, TEXTS),
    min_size=1,
    max_size=8,
)
TOOLS = (ToolSpec(name="add"),)


def resent(message: Message) -> Message:
    """An answer as a framework sends it back."""
    calls = tuple(c.model_copy(update={"id": f"new_{c.id}"}) for c in message.tool_calls)
    return message.model_copy(update={"reasoning": None, "tool_calls": calls})


@examples(60)
@given(STEPS)
def test_each_sampled_id_is_trained_once(steps: list[tuple[str, str, str]]) -> None:
    session = GatewaySession(group_spec(template()), 0, "/v1/samples/s", "key", 60.0)
    policy = ScriptedPolicy([said(answer, reasoning="hm", add=answer) for _, _, answer in steps])
    history: list[Message] = []
    for what, text, _ in steps:
        if what == "branch":
            history = history[:-2]
        elif what == "shorten":
            history = history[1:]
        elif what == "edit" and history:
            edited = history[-1].model_copy(update={"content": f"edited {text}"})
            history = [*history[:-1], edited]
        history.append(Message(role="user", content=text))
        tools = TOOLS if what == "tools" else ()
        [(call, request)] = session.ask(ModelRequest(messages=tuple(history), tools=tools))
        turn = session.answer(call, asyncio.run(policy.sample(request)))
        history.append(resent(turn.message))
    num_tokens = session.num_tokens
    turns, _ = session.close()
    rows = sequences_of(turns)
    trained: Counter[tuple[int, float]] = Counter()
    for row in rows:
        for token, own, logprob in zip(row.tokens, row.loss_mask, row.logprobs, strict=True):
            assert own or logprob == 0.0
            if own:
                trained[token, logprob] += 1
    sampled = [(i, p) for t in turns for i, p in zip(t.completion_ids, t.logprobs, strict=True)]
    assert trained == Counter(sampled)
    assert len(turns) == len(steps)
    assert num_tokens >= sum(len(row.tokens) for row in rows)
