"""Templates and ids: turns are continued exactly, or rendered again where the template rewrites
history."""

from datetime import UTC, datetime

import pytest
import torch

from schemas.errors import UserCodeError
from schemas.sampling import Message, SampleRequest, Turn
from tests.unit.trainer.support import TINY, request
from trainer.model.base import build_base
from trainer.model.chat_template import Chat

END = 6


@pytest.fixture
def chat() -> Chat:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    return Chat(base.tokenizer, base.stop_ids)


def said(role: str, content: str) -> Message:
    return Message.model_validate({"role": role, "content": content})


def second_turn(chat: Chat, *, ended: bool, reply: str | None = None) -> tuple[Turn, SampleRequest]:
    asked = request("hi")
    prompt = tuple(chat.prompt_ids(asked))
    ids = tuple(chat.encode("ok")) + ((END,) if ended else ())
    turn = Turn(
        prompt_ids=prompt,
        completion_ids=ids,
        logprobs=(0.0,) * len(ids),
        text="ok",
        finish_reason="stop" if ended else "length",
    )
    messages = (*asked.messages, said("assistant", reply or "ok"), said("user", "go on"))
    fields = {"history": (turn,), "history_messages": asked.messages, "messages": messages}
    return turn, asked.model_copy(update=fields)


@pytest.mark.parametrize("ended", [True, False])
def test_a_continuation_is_prompt_plus_sampled_plus_suffix(chat: Chat, ended: bool) -> None:
    turn, asked = second_turn(chat, ended=ended)
    suffix = chat.encode("<|user|>go on<|end|><|assistant|>")
    expected = [*turn.prompt_ids, *turn.completion_ids, *([] if ended else [END]), *suffix]
    assert chat.prompt_ids(asked) == expected


def test_sampled_ids_are_kept_where_text_would_be_tokenised_otherwise(chat: Chat) -> None:
    turn, asked = second_turn(chat, ended=True)
    odd = turn.model_copy(update={"completion_ids": (1, 1, END), "text": "ok"})
    kept = chat.prompt_ids(asked.model_copy(update={"history": (odd,)}))
    assert kept[: len(turn.prompt_ids) + 3] == [*turn.prompt_ids, 1, 1, END]


def test_another_reply_is_rendered_afresh(chat: Chat) -> None:
    _, asked = second_turn(chat, ended=True, reply="edited")
    assert chat.prompt_ids(asked) == chat.encode(chat.text(asked.messages, reply_next=True))


def test_another_history_is_rendered_afresh(chat: Chat) -> None:
    _, asked = second_turn(chat, ended=True)
    other = (said("user", "something else"), *asked.messages[1:])
    asked = asked.model_copy(update={"messages": other})
    assert chat.prompt_ids(asked) == chat.encode(chat.text(other, reply_next=True))


def test_a_template_that_rewrites_history_starts_a_new_row(chat: Chat) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
        "{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    chat._tokenizer.chat_template = template
    turn, asked = second_turn(chat, ended=True)
    ids = chat.prompt_ids(asked)
    assert ids[: len(turn.prompt_ids)] == list(turn.prompt_ids)
    assert ids == chat.encode("hi<|end|>go on<|end|>")


def test_a_template_that_refuses_is_the_samples_failure(chat: Chat) -> None:
    chat._tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(UserCodeError, match="no system role"):
        chat.prompt_ids(request("x"))


@pytest.mark.parametrize(
    "form",
    ["%d %b %Y", "%A, %-d %B %y", "%e|%j|%^a|%%|%H:%M:%S", "plain", "100% of %m", "%Q %", ""],
)
def test_a_template_that_asks_for_the_time_is_told_the_day_as_python_would(
    chat: Chat, form: str
) -> None:
    dated = Chat(chat._tokenizer, chat._stop_ids, date="2026-02-03")
    chat._tokenizer.chat_template = (
        "\n {% if strftime_now is defined %}{{ strftime_now(f) }}{% endif %}"
    )
    chat._tokenizer.chat_template = chat._tokenizer.chat_template.replace("(f)", f"({form!r})")
    expected = datetime(2026, 2, 3, tzinfo=UTC).strftime(form)
    assert dated.text(request("x").messages, reply_next=True) == "\n" + expected


def test_a_token_without_a_spelling_is_unknown(chat: Chat) -> None:
    assert chat.encode("aé") == [*chat.encode("a"), 1]
    assert chat.decode(chat.encode("a\nb ~")) == "a\nb ~"


def test_the_samples_of_a_group_render_their_prompt_once(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("hi")
    expected = chat.prompt_ids(asked)
    expected.append(0)
    monkeypatch.setattr(Chat, "text", lambda *_, **__: "")
    again = request("hi", sample=1)
    assert chat.prompt_ids(again) == expected[:-1], "nobody else's list"
    assert chat.prompt_ids(request("hello")) == []
