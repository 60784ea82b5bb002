"""Ids of consecutive texts, with tokenizers that put a space before each text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from schemas.sampling import Message, Turn
from tests.kit.property_examples import examples
from tests.kit.tokenizers import PREFIXED, TEMPLATES, Kind, tokenizer_of
from tests.unit.trainer.support import request
from trainer.model import text_parts
from trainer.model.chat_template import Chat
from trainer.model.loss_turns import training_rows
from trainer.model.text_parts import ids_of_parts, prepends

TALK = (("user", "2 + 2 ?"), ("assistant", "4"), ("user", "and one ?"), ("assistant", "It is 5 ."))
ANSWERS = ("4", "seven", "It is 4 .", "ünï")
ALL = (*PREFIXED, "bytes")


def chat_of(kind: Kind, template: str) -> Chat:
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = TEMPLATES[template]
    return Chat(tokenizer, frozenset({tokenizer.eos_token_id}))


def said(*messages: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message.model_validate({"role": r, "content": c}) for r, c in messages)


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def whole(chat: Chat, talk: tuple[tuple[str, str], ...]) -> list[int]:
    """The ids of the whole rendered conversation, up to the end of its last turn."""
    return chat.encode(chat.cut_after_last_turn(chat.text(said(*talk), reply_next=False)))


def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former method: each text is encoded by itself."""
    monkeypatch.setattr(
        Chat, "encode_parts", lambda chat, texts: [chat.encode(text) for text in texts]
    )


@pytest.mark.parametrize("kind", ALL)
def test_it_is_known_which_tokenizers_put_something_before_a_text(kind: Kind) -> None:
    assert prepends(tokenizer_of(kind)) == (kind != "bytes")


@pytest.mark.parametrize("template", ["llama 2", "mistral", "lines"])
@pytest.mark.parametrize("kind", ALL)
def test_trained_tokens_have_the_ids_of_the_whole_conversation(kind: Kind, template: str) -> None:
    chat = chat_of(kind, template)
    for answer in ANSWERS:
        talk = (TALK[0], ("assistant", answer), *TALK[2:])
        (row,) = training_rows(chat, said(*talk), learned="assistant")
        assert row.ids == whole(chat, talk)
        learned = [i for i, bit in zip(row.ids, row.learned, strict=True) if bit]
        assert learned.count(chat._end_id) == 2
        text = str(chat._tokenizer.decode(learned, skip_special_tokens=True))
        assert "".join(text.split()) == "".join(f"{answer}{TALK[3][1]}".split())


def test_twin_in_pieces_nearly_every_answer_begins_with_a_space_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_pieces(monkeypatch)
    same = 0
    for kind in PREFIXED:
        for answer in ANSWERS:
            chat = chat_of(kind, "mistral")
            talk = (TALK[0], ("assistant", answer))
            (row,) = training_rows(chat, said(*talk), learned="assistant")
            same += row.ids == whole(chat, talk)
    assert same == 0, "of 16"


def test_a_run_of_before_has_the_ids_of_before() -> None:
    tokenizer = tokenizer_of("legacy")
    texts = ("<s>[INST] two", " [/INST]", "It is")
    chat = Chat(tokenizer, frozenset(), apart=True)
    assert chat.encode_parts(texts) == [chat.encode(text) for text in texts]
    assert chat.encode_parts(texts) != Chat(tokenizer, frozenset()).encode_parts(texts)


@pytest.mark.parametrize("kind", PREFIXED)
def test_a_continuation_goes_on_as_the_whole_does(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = chat_of(kind, "plain")
    first = request("2 + 2 ?")
    prompt = chat.prompt_ids(first)
    _, reply = chat.encode_parts((chat.text(first.messages, reply_next=True), "4"))
    turn = Turn(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(reply),
        logprobs=(0.0,) * len(reply),
        text="4",
        finish_reason="stop",
    )
    talk = (*first.messages, *said(("assistant", "4"), ("user", "and one ?")))
    update = {"messages": talk, "history": (turn,), "history_messages": first.messages}
    asked = first.model_copy(update=update)
    expected = chat.encode(chat.text(talk, reply_next=True))
    assert chat.prompt_ids(asked) == expected
    in_pieces(monkeypatch)
    assert chat.prompt_ids(asked) != expected, "twin: the text behind the answer by itself"


TEXT = st.text("ab4 .\n?é好", max_size=6) | st.sampled_from(["</s>", "[INST]", " [/INST]", "the"])


@examples(60)
@given(kind=st.sampled_from(ALL), texts=st.lists(TEXT, min_size=1, max_size=5))
def test_the_parts_are_the_whole_but_where_a_token_reaches_over(
    kind: Kind, texts: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    found = ids_of_parts(tokenizer, texts)
    assert len(found) == len(texts)
    joined, ends = "".join(texts), [len("".join(texts[:n])) for n in range(1, len(texts))]
    ids, places = text_parts._places(tokenizer, joined, ends)
    if None not in places:
        assert [i for part in found for i in part] == ids
    text = str(tokenizer.decode([i for part in found for i in part]))
    expected = str(tokenizer.decode(encoded(tokenizer, joined)))
    if kind != "unigram":  # it knows no bytes, so some characters are lost either way
        assert text == expected, "nothing is added between two parts"


@pytest.mark.parametrize("kind", PREFIXED)
def test_a_token_that_reaches_over_is_cut_and_nothing_is_put_between(kind: Kind) -> None:
    tokenizer = tokenizer_of(kind)
    assert len(encoded(tokenizer, "answer")) < len(encoded(tokenizer, "ans")) + len("wer")
    before, behind = ids_of_parts(tokenizer, ("the ans", "wer is"))
    assert before == encoded(tokenizer, "the ans")
    assert tokenizer.decode([*before, *behind]) == "the answer is"
    assert tokenizer.convert_ids_to_tokens(behind[0])[0] != "▁"


@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_a_tokenizer_without_places_is_cut_where_the_ids_begin_alike(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(kind)
    texts = ("<s>[INST] two", " [/INST]", " It is", " 4 .</s>")
    expected = ids_of_parts(tokenizer, texts)
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda _: False))
    assert ids_of_parts(tokenizer, texts) == expected
    assert prepends(tokenizer)


def test_byte_level_ids_are_those_of_each_text_by_itself() -> None:
    chat = chat_of("bytes", "mistral")
    texts = ("<s>[INST] two", " [/INST]", "It is", " 4\n", "\n.</s>")
    assert chat.encode_parts(texts) == [chat.encode(text) for text in texts]
