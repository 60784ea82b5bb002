"""Models whose family the package `renderers` knows: their ids are its ids, and sampled ids stay."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from schemas.sampling import Message, ToolCall, ToolSpec, Turn, sequences_of
from tests.unit.trainer.support import request
from trainer.model.chat_template import Chat
from trainer.model.family_renderer import find_renderer, record_name

SPECIAL = {
    "Qwen/Qwen3-4B": (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"),
    ),
}
ENDS = {"Qwen/Qwen3-4B": "<|im_end|>", "meta-llama/Llama-3.2-1B-Instruct": "<|eot_id|>"}
ADD = ToolSpec(
    name="add",
    description="Adds.",
    parameters=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}),
)
TODAY = datetime(2026, 2, 3, tzinfo=UTC)
USER = Message(role="user", content="1+2?")


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the special tokens of a family, and its name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    framing = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    backend.add_tokens(
        [AddedToken(t, special=t not in framing, normalized=False) for t in SPECIAL[name]]
    )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL[name] if t not in framing]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ENDS[name])
    made.name_or_path = name
    made.chat_template = "{{ raise_exception('the renderer writes this conversation') }}"
    return made


def chat_of(name: str) -> Chat:
    tokenizer = tokenizer_of(name)
    return Chat(tokenizer, frozenset(tokenizer.encode(ENDS[name])))


CHATS = {name: chat_of(name) for name in SPECIAL}


@pytest.mark.parametrize("name", ["/models/mine", "scratch", "acme/unknown", "acme/a/b"])
def test_other_models_keep_their_own_template(name: str) -> None:
    tokenizer = tokenizer_of("Qwen/Qwen3-4B")
    tokenizer.name_or_path = name
    assert find_renderer(tokenizer, TODAY) is None


def test_a_checkpoint_carries_the_name_of_its_base(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("Qwen/Qwen3-4B")
    tokenizer.name_or_path = "/models/mine"
    record_name(tokenizer, "Qwen/Qwen3-4B")
    for folder in (tmp_path / "first", tmp_path / "second"):
        tokenizer.save_pretrained(folder)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        assert find_renderer(tokenizer, TODAY) is not None


def test_a_renderer_that_cannot_be_made_leaves_the_template() -> None:
    tokenizer = tokenizer_of("Qwen/Qwen3-4B")
    tokenizer.name_or_path = "meta-llama/Llama-3.2-1B-Instruct"
    assert find_renderer(tokenizer, TODAY) is None


def test_a_prompt_has_the_day_of_the_run() -> None:
    tokenizer = tokenizer_of("meta-llama/Llama-3.2-1B-Instruct")
    for date, written in (("2026-02-03", "03 Feb 2026"), (None, "26 Jul 2024")):
        chat = Chat(tokenizer, frozenset(tokenizer.encode("<|eot_id|>")), date=date)
        asked = request("").model_copy(update={"messages": (USER,)})
        assert f"Today Date: {written}" in tokenizer.decode(chat.prompt_ids(asked))


def turn_of(chat: Chat, ids: list[int], *, after: tuple[Turn, tuple[Message, ...]] | None) -> Turn:
    asked = request("").model_copy(update={"messages": (USER,), "tools": (ADD,)})
    if after is not None:
        last, messages = after
        before = messages[: messages.index(last.message)]
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
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(max_size=10), min_size=1, max_size=3), said=st.text(max_size=10))
def test_what_was_sampled_is_in_the_next_prompt(name: str, texts: list[str], said: str) -> None:
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
