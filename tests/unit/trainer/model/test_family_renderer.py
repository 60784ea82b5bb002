"""Models whose family the package `renderers` knows: their ids are its ids, and sampled ids stay."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from schemas.sampling import Message, ToolCall, ToolSpec, Turn, sequences_of
from tests.kit.property_examples import examples
from tests.unit.trainer.model.family_tokenizers import SPECIAL, family_chat, family_tokenizer
from tests.unit.trainer.support import request
from trainer.model.chat_template import Chat
from trainer.model.family_renderer import NAME_KEY, find_renderer, record_name

ADD = ToolSpec(
    name="add",
    description="Adds.",
    parameters=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}),
)
TODAY = datetime(2026, 2, 3, tzinfo=UTC)
USER = Message(role="user", content="1+2?")


CHATS = {name: family_chat(name) for name in SPECIAL}


@pytest.mark.parametrize("name", ["/models/mine", "scratch", "acme/unknown", "acme/a/b"])
def test_other_models_keep_their_own_template(name: str) -> None:
    tokenizer = family_tokenizer("Qwen/Qwen3-4B")
    record_name(tokenizer, name)
    assert find_renderer(tokenizer, TODAY) is None


def test_a_directory_that_is_named_like_a_model_keeps_its_own_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: the name of a model from the hub is recorded."""
    monkeypatch.chdir(tmp_path)
    name = "Qwen/Qwen3-4B"
    plain = family_tokenizer(name)
    del plain.init_kwargs[NAME_KEY]
    plain.save_pretrained(name)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(name)
    assert tokenizer.name_or_path == name
    assert find_renderer(tokenizer, TODAY) is None
    record_name(tokenizer, name)
    assert find_renderer(tokenizer, TODAY) is not None


def test_a_checkpoint_carries_the_name_of_its_base(tmp_path: Path) -> None:
    tokenizer = family_tokenizer("Qwen/Qwen3-4B")
    record_name(tokenizer, "Qwen/Qwen3-4B")
    for folder in (tmp_path / "first", tmp_path / "second"):
        tokenizer.save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        assert find_renderer(tokenizer, TODAY) is not None


def test_a_renderer_that_cannot_be_made_leaves_the_template() -> None:
    tokenizer = family_tokenizer("Qwen/Qwen3-4B")
    record_name(tokenizer, "meta-llama/Llama-3.2-1B-Instruct")
    assert find_renderer(tokenizer, TODAY) is None


def test_a_prompt_has_the_day_of_the_run() -> None:
    tokenizer = family_tokenizer("meta-llama/Llama-3.2-1B-Instruct")
    for date, written in (("2026-02-03", "03 Feb 2026"), (None, "26 Jul 2024")):
        chat = Chat(tokenizer, frozenset(tokenizer.encode("<|eot_id|>")), date=date)
        asked = request("").model_copy(update={"messages": (USER,)})
        assert f"Today Date: {written}" in tokenizer.decode(chat.prompt_ids(asked))


def turn_of(chat: Chat, ids: list[int], *, after: tuple[Turn, tuple[Message, ...]] | None) -> Turn:
    asked = request("").model_copy(update={"messages": (USER,), "tools": (ADD,)})
    if after is not None:
        last, messages = after
        before = messages[:-2]
        asked = asked.model_copy(
            update={"messages": messages, "history": (last,), "history_messages": before}
        )
    prompt = tuple(chat.prompt_ids(asked))
    answer = chat.answer(ids, chat.decode(ids), prompt_ids=prompt, tools=asked.tools)
    assert answer is not None
    return Turn(
        prompt_ids=prompt,
        completion_ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        text=answer.content,
        answer=answer,
        finish_reason="stop",
    )


def test_qwen_calls_and_reasoning_are_found_by_their_tokens() -> None:
    chat = CHATS["Qwen/Qwen3-4B"]
    ids = chat.encode(
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>"
    )
    turn = turn_of(chat, ids, after=None)
    assert turn.message.reasoning == "hm"
    assert turn.message.tool_calls == (ToolCall(id="call_0", name="add", arguments='{"a": 1}'),)
    result = Message(role="tool", content="3", tool_call_id="call_0")
    again = turn_of(chat, ids, after=(turn, (USER, turn.message, result)))
    own = (*turn.prompt_ids, *turn.completion_ids)
    assert again.prompt_ids[: len(own)] == own
    assert "<tool_response>" in chat._tokenizer.decode(list(again.prompt_ids[len(own) :]))
    assert len(sequences_of((turn, again))) == 1


def test_a_call_that_is_no_json_stays_in_the_content() -> None:
    chat = CHATS["Qwen/Qwen3-4B"]
    turn = turn_of(chat, chat.encode("<tool_call>\nno\n</tool_call><|im_end|>"), after=None)
    assert turn.message.tool_calls == ()
    assert "no" in turn.message.content


@pytest.mark.parametrize("name", SPECIAL)
@examples(40)
@given(texts=st.lists(st.text(max_size=10), min_size=1, max_size=3), said=st.text(max_size=10))
def test_sampled_tokens_are_in_the_next_prompt(name: str, texts: list[str], said: str) -> None:
    chat = CHATS[name]
    (end,) = chat._stop_ids
    turns: list[Turn] = []
    messages: tuple[Message, ...] = (USER,)
    for text in texts:
        last = (turns[-1], messages) if turns else None
        ids = [i for i in chat.encode(text) if i not in chat._tokenizer.all_special_ids]
        turns.append(turn_of(chat, [*ids, end], after=last))
        messages = (*messages, turns[-1].message, Message(role="user", content=said))
    rows = sequences_of(tuple(turns))
    trained = [t for row in rows for t, m in zip(row.tokens, row.loss_mask, strict=True) if m]
    assert trained == [i for turn in turns for i in turn.completion_ids]
    assert len(rows) == 1 or name.startswith("Qwen")


def test_an_answer_that_looks_like_a_call_is_text_without_tools() -> None:
    """Llama calls tools by plain JSON, which is also what a user may ask for."""
    chat, written = CHATS["meta-llama/Llama-3.2-1B-Instruct"], '{"name": "add", "parameters": {}}'
    ids = chat.encode(written)
    answers = [chat.answer(ids, written, prompt_ids=[], tools=tools) for tools in ((), (ADD,))]
    assert [(a.content, len(a.tool_calls)) for a in answers if a] == [(written, 0), ("", 1)]


def test_a_history_whose_beginning_was_cut_is_not_continued() -> None:
    """A framework dropped the question and kept the answer. Twin: with the question it is continued."""
    chat = CHATS["Qwen/Qwen3-4B"]
    (end,) = chat._stop_ids
    turn = turn_of(chat, [*chat.encode("3"), end], after=None)
    cut = (turn.message, Message(role="tool", content="3", tool_call_id="call_0"))
    own = (*turn.prompt_ids, *turn.completion_ids)
    for messages, before, is_continued in (((USER, *cut), (USER,), True), (cut, (), False)):
        asked = request("").model_copy(
            update={
                "messages": messages,
                "tools": (ADD,),
                "history": (turn,),
                "history_messages": before,
            }
        )
        prompt = tuple(chat.prompt_ids(asked))
        assert (prompt[: len(own)] == own) == is_continued
