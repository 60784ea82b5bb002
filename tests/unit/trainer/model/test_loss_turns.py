"""Which tokens of a conversation are learned: spans that are exact to the token, under all kinds of
templates."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import LossTurns
from schemas.sampling import Message, ToolCall, ToolSpec, Turn
from tests.unit.trainer.model.family_tokenizers import SPECIAL, family_chat
from tests.unit.trainer.support import TINY, request
from trainer.model.base import build_base
from trainer.model.chat_template import Chat
from trainer.model.loss_turns import TrainingRow, training_rows

END = 6
TALK = (
    ("system", "sum"),
    ("user", "2+2?"),
    ("assistant", "4"),
    ("user", "and 1?"),
    ("assistant", "that is 5"),
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}{% generation %}"
    "{{ m.content + '<|end|>' }}{% endgeneration %}{% else %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TAILED = (
    "{% for m in messages %}[{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def chat_of(template: str | None = None) -> Chat:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    if template is not None:
        base.tokenizer.chat_template = template
    return Chat(base.tokenizer, base.stop_ids)


@pytest.fixture
def chat() -> Chat:
    return chat_of()


def said(*messages: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message.model_validate({"role": r, "content": c}) for r, c in messages)


def rows(
    chat: Chat, *messages: tuple[str, str], learned: LossTurns = "assistant"
) -> list[TrainingRow]:
    return training_rows(chat, said(*messages), learned=learned)


def spans(row: TrainingRow) -> list[list[int]]:
    """The spans of consecutive learned ids."""
    found: list[list[int]] = []
    for at, (token, bit) in enumerate(zip(row.ids, row.learned, strict=True)):
        if bit and (at == 0 or not row.learned[at - 1]):
            found.append([])
        if bit:
            found[-1].append(token)
    return found


def test_an_answer_ends_with_the_token_that_ends_the_turn(chat: Chat) -> None:
    (row,) = rows(chat, ("user", "2+2?"), ("assistant", "4"))
    context = chat.encode("<|user|>2+2?<|end|><|assistant|>")
    assert row.ids == [*context, *chat.encode("4"), END]
    assert row.learned == [0] * len(context) + [1, 1]


def test_every_answer_is_learned_and_nothing_else(chat: Chat) -> None:
    (row,) = rows(chat, *TALK)
    assert spans(row) == [[*chat.encode("4"), END], [*chat.encode("that is 5"), END]]
    assert row.ids == chat.encode(chat.text(said(*TALK), reply_next=False))


def test_only_the_last_answer_is_learned(chat: Chat) -> None:
    (row,) = rows(chat, *TALK, learned="last")
    assert spans(row) == [[*chat.encode("that is 5"), END]]
    assert row.ids == rows(chat, *TALK)[0].ids


def test_everything_that_the_template_writes(chat: Chat) -> None:
    (row,) = rows(chat, *TALK, learned="all")
    assert set(row.learned) == {1}
    assert row.ids == rows(chat, *TALK)[0].ids


def test_spans_are_those_that_a_template_marks_itself() -> None:
    """Where a template has generation markers, Transformers' own mask is the oracle."""
    chat = chat_of(MARKED)
    theirs: Any = chat._tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in TALK],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (row,) = rows(chat, *TALK)
    assert row.ids == list(theirs["input_ids"])
    assert row.learned == list(theirs["assistant_masks"])
    assert 0 < sum(row.learned) < len(row.learned)


def test_tokens_after_a_turn_are_context_of_the_next() -> None:
    chat = chat_of(TAILED)
    (row,) = rows(chat, *TALK)
    assert spans(row) == [[*chat.encode("4"), END], [*chat.encode("that is 5"), END]]
    assert row.ids == chat.encode(chat.text(said(*TALK), reply_next=False))[:-1]


def test_a_template_that_forgets_gives_each_answer_a_row_of_its_own() -> None:
    chat = chat_of(FORGETFUL)
    first, second = rows(chat, *TALK)
    assert spans(first) == [[*chat.encode("4"), END]]
    assert spans(second) == [[*chat.encode("that is 5"), END]]
    assert "4" not in chat.decode(second.ids)


def test_a_template_without_an_end_is_given_the_models() -> None:
    chat = chat_of(ENDLESS)
    (row,) = rows(chat, *TALK)
    assert spans(row) == [[*chat.encode("4"), END], [*chat.encode("that is 5"), END]]


def test_the_ids_are_those_that_sampling_would_have(chat: Chat) -> None:
    """The second prompt of a workflow, after the first answer was sampled."""
    asked = request("2+2?")
    answer = [*chat.encode("4"), END]
    turn = Turn(
        prompt_ids=tuple(chat.prompt_ids(asked)),
        completion_ids=tuple(answer),
        logprobs=(0.0, 0.0),
        text="4",
        finish_reason="stop",
    )
    talk = (("user", "2+2?"), ("assistant", "4"), ("user", "and 1?"))
    more = asked.model_copy(
        update={
            "history": (turn,),
            "history_messages": asked.messages,
            "messages": said(*talk),
        }
    )
    (row,) = rows(chat, *talk, ("assistant", "5"))
    assert row.ids == [*chat.prompt_ids(more), *chat.encode("5"), END]


TEMPLATES = {name: chat_of(t) for name, t in {"own": None, "tailed": TAILED}.items()}
TEXT = st.text("ab1 \n<|end|>", max_size=8)


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
)
def test_the_pieces_of_a_conversation_are_the_whole(
    name: str, turns: list[tuple[str, str]]
) -> None:
    chat = TEMPLATES[name]
    talk = [pair for asked, told in turns for pair in (("user", asked), ("assistant", told))]
    (row,) = rows(chat, *talk)
    whole = chat.encode(chat.text(said(*talk), reply_next=False))
    assert row.ids == whole[: len(row.ids)]
    assert len(spans(row)) == len(turns)
    assert all(span[-1] == END for span in spans(row))


def test_calls_of_tools_are_learned_and_their_results_are_not(chat: Chat) -> None:
    call = ToolCall(id="call_0", name="add", arguments='{"l":1}')
    messages = (
        *said(("user", "1?")),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="2", tool_call_id="call_0"),
        *said(("assistant", "two")),
    )
    tools = (ToolSpec(name="add", parameters='{"properties": {"l": {}}}'),)
    [row] = training_rows(chat, messages, tools=tools, learned="assistant")
    expected = chat.text(messages, tools=tools, reply_next=False)
    assert row.ids == chat.encode(expected)
    spans = [
        chat.encode('<|tool|>add{"l":1}<|end|>'),
        chat.encode("two<|end|>"),
    ]
    learned = [id_ for id_, bit in zip(row.ids, row.learned, strict=True) if bit]
    assert learned == [*spans[0], *spans[1]]


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("learned", ["assistant", "last", "all"])
def test_calls_are_learned_as_the_family_writes_them(name: str, learned: LossTurns) -> None:
    """The chat template of these tokenizers cannot write anything."""
    chat = family_chat(name)
    calls = (ToolCall(id="call_0", name="add", arguments='{"a": 1}'),)
    talk = (
        Message(role="user", content="1+2?"),
        Message(role="assistant", content="", tool_calls=calls),
        Message(role="tool", content="3", tool_call_id="call_0"),
        Message(role="assistant", content="three"),
    )
    tools = (ToolSpec(name="add"),)
    rows = training_rows(chat, talk, tools=tools, learned=learned)
    parts = [
        str(chat._tokenizer.decode([i for i, own in zip(row.ids, row.learned, strict=True) if own]))
        for row in rows
    ]
    text = "".join(parts)
    assert "three" in text
    assert ("add" in text) == (learned != "last")
    assert ("1+2?" in text) == (learned == "all")
    if learned == "all":
        return
    for row in rows:
        assert row.ids[-1] in chat._stop_ids
        assert row.learned[-1]
