"""What a client is told while an answer is sampled is the beginning of that answer, and never a call."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.sampling import ToolSpec
from tests.kit.property_examples import examples
from tests.unit.trainer.model.family_tokenizers import SPECIAL, family_chat
from tests.unit.trainer.support import TINY
from trainer.model.base import build_base
from trainer.model.chat_template import Chat
from trainer.model.stable_prefix import after_reasoning, before_marks, before_tagged_call

ADD = ToolSpec(name="add")
TAGGED = "{{ messages[0].content }}<tool_call></tool_call>"
THINKING = f"{TAGGED}<think></think>"
OURS, LLAMA, QWEN = "ours", *sorted(SPECIAL, reverse=True)
KINDS = (OURS, TAGGED, THINKING, LLAMA, QWEN)
CHATS: dict[str, Chat] = {}


def chat_of(kind: str) -> Chat:
    """The chat of our own template, of another template, or of a family."""
    if kind not in CHATS:
        base = build_base(TINY, {}, device=torch.device("cpu"))
        if kind != OURS:
            base.tokenizer.chat_template = kind
        CHATS[kind] = family_chat(kind) if kind in SPECIAL else Chat(base.tokenizer, base.stop_ids)
    return CHATS[kind]


PARTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "</thi", " ", "\n\n"),
            *(
                '{"name": "add", "arguments": {}}',
                "<|tool|>",
                "<|tool|>add{}",
                "<|to",
                "STOP",
                "ST",
            ),
            *("é", "\N{GRINNING FACE}", "\N{REPLACEMENT CHARACTER}"),
        ]
    ),
)


PIECES = (
    "<",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|tool|>",
    "{",
    " ",
    "a",
    "ST",
    "OP",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("stop", [(), ("STOP",)])
def test_streamed_text_of_any_two_parts_is_never_taken_back(
    kind: str, *, tools: bool, stop: tuple[str, ...]
) -> None:
    """Without hypothesis: every pair of the marks of all families, and their beginnings."""
    for parts in product(PIECES, repeat=2):
        check_told(kind, "".join(parts), offered=(ADD,) if tools else (), stop=stop)


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(parts=st.lists(PARTS, max_size=6), tools=st.booleans(), stops=st.booleans())
def test_streamed_text_is_the_beginning_of_the_content(
    kind: str, *, parts: list[str], tools: bool, stops: bool
) -> None:
    stop = ("STOP",) if stops else ()
    check_told(kind, "".join(parts), offered=(ADD,) if tools else (), stop=stop)


def check_told(
    kind: str, said: str, *, offered: tuple[ToolSpec, ...], stop: tuple[str, ...]
) -> None:
    check_told_ids(kind, chat_of(kind).encode(said), offered=offered, stop=stop)


def check_told_ids(
    kind: str, ids: list[int], *, offered: tuple[ToolSpec, ...], stop: tuple[str, ...]
) -> None:
    """Check what is told after each token of an answer."""
    chat = chat_of(kind)
    text = said = chat.decode(ids)
    cut = text.partition("STOP")[0] if stop else text
    answer = chat.answer(ids, cut, prompt_ids=[], tools=offered)
    content = cut if answer is None else answer.content
    told = ""
    for size in range(1, len(ids) + 1):
        if stop and "STOP" in chat.decode(ids[:size]):
            break
        now = chat.stable_prefix(ids[:size], prompt_ids=[], tools=offered, stop=stop)
        assert now.startswith(told), (said, size)
        assert content.startswith(now), (said, size)
        if kind != OURS and answer and answer.tool_calls:
            assert "<tool_call>" not in now
        told = now


@pytest.mark.parametrize("kind", KINDS)
def test_white_space_of_several_bytes_takes_nothing_back(kind: str) -> None:
    """A line separator is incomplete bytes first, and then white space, which ends no answer."""
    for said in ("a  \u2028b", "a  \u2028"):
        check_told(kind, said, offered=(), stop=())


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("token", ["<|start_header_id|>", "<|end_header_id|>"])
def test_a_header_inside_an_answer_takes_nothing_back(token: str, *, tools: bool) -> None:
    """A policy may draw any token. Llama's renderer drops what comes before a header."""
    chat = chat_of(LLAMA)
    header = chat._tokenizer.get_vocab()[token]
    for before, after in product(("", "+", "one two"), ("", "<t", "three")):
        ids = [*chat.encode(before), header, *chat.encode(after)]
        check_told_ids(LLAMA, ids, offered=(ADD,) if tools else (), stop=())
        answer = chat.answer(ids, chat.decode(ids), prompt_ids=[], tools=())
        assert answer is not None
        assert answer.content.startswith(before)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_is_told_at_once(kind: str) -> None:
    chat = chat_of(kind)
    for tools in ((), (ADD,)):
        ids = chat.encode("one two")
        assert chat.stable_prefix(ids, prompt_ids=[], tools=tools, stop=("x",)) == "one two"


@pytest.mark.parametrize("kind", [TAGGED, THINKING, QWEN])
def test_no_part_of_a_tagged_call_is_told(kind: str) -> None:
    """Twin: without the marks the tag itself is told."""
    chat = chat_of(kind)
    ids = chat.encode('so <tool_call>{"name": "add"}')
    told = {
        chat.stable_prefix(ids[:size], prompt_ids=[], tools=(ADD,), stop=())
        for size in range(len(ids) + 1)
    }
    assert told == {"", "s", "so"}
    assert before_marks("a<tool", ()) == "a<tool"


def test_text_is_cut_before_marks_that_may_begin() -> None:
    assert before_marks("ab", ("bc",)) == "a"
    assert before_marks("abcd", ("bc", "a")) == ""
    assert before_marks("<<think>", ("<think>",)) == "<"
    assert before_marks("abX", ("bX", "abXZ")) == ""
    assert before_tagged_call(" x") == ""
    assert before_tagged_call("x <tool_c") == "x"
    assert before_tagged_call("x <b") == "x <b"
    assert after_reasoning("hm", is_open=True) == ""
    assert after_reasoning("<thi", is_open=False) == ""
    assert after_reasoning("<think>a</think>\nb", is_open=False) == "b"
    assert after_reasoning("<them>", is_open=False) == "<them>"
