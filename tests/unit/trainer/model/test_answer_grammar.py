"""Grammars of forced answers in the syntax of a model's own chat template."""

import json
import time
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from schemas.errors import UserCodeError
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ToolSpec
from tests.unit.trainer.model.family_tokenizers import SPECIAL, family_chat
from tests.unit.trainer.model.test_tool_calls import TAGGED, chat_of
from trainer.grammar.answer_grammar import _refuse_long_ways, answer_grammar
from trainer.grammar.token_masks import GrammarVocabulary, VllmVocabulary, is_allowed
from trainer.model.chat_template import Chat

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
TOOLS = (ToolSpec(name="add", parameters=SCHEMA), ToolSpec(name="sub", parameters=SCHEMA))
CALL, FORMAT = Constraint(calls=("add", "sub")), Constraint(json_schema=SCHEMA)
QUESTION = [Message(role="user", content="?")]
THINKING = TAGGED.replace("{{ m.content }}", "{{ (m.content.split('</think>') | last) }}")
OPEN = THINKING.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")


def is_followed(
    chat: Chat, constraint: Constraint, text: str, *, tools: tuple[ToolSpec, ...] = TOOLS
) -> bool:
    """Whether the grammar of an answer to a prompt allows this text as the whole answer."""
    tokenizer, end = chat._tokenizer, 6
    vocabulary = GrammarVocabulary(tokenizer, chat._stop_ids, size=len(tokenizer))
    prompt = chat.encode(chat.text(QUESTION, tools=tools, reply_next=True))
    state = vocabulary.start(answer_grammar(constraint, tools, chat, prompt))
    for token in chat.encode(text):
        if not is_allowed(state.allowed, token):
            return False
        state.advance(token)
    return is_allowed(state.allowed, end)


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>', True),
        ('<tool_call>{"name": "sub", "arguments": {"a": -1}}</tool_call>', True),
        ('<tool_call>{"name": "mul", "arguments": {"a": 12}}</tool_call>', False),
        ('<tool_call>{"name": "add", "arguments": {"b": 12}}</tool_call>', False),
        ('<tool_call>{"name": "add", "arguments": {"a": 12}}', False),
        ('so <tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>', False),
    ],
)
def test_a_call_has_the_form_that_the_template_writes(text: str, follows: bool) -> None:
    assert is_followed(chat_of(TAGGED), CALL, text) is follows


def test_a_named_call_allows_no_other_tool() -> None:
    named = Constraint(calls=("sub",))
    form = '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>'
    assert is_followed(chat_of(TAGGED), named, form % "sub")
    assert not is_followed(chat_of(TAGGED), named, form % "add")


def test_our_own_template_marks_calls_with_its_token() -> None:
    assert is_followed(chat_of(), CALL, '<|tool|>add{"a": 1}')
    assert not is_followed(chat_of(), CALL, 'add{"a": 1}')
    assert not is_followed(chat_of(), FORMAT, '<|tool|>add{"a": 1}')


ADDS = {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("parameters", "follows", "fails"),
    [
        ({}, "{}", '{"a": 1}'),
        ({"description": "adds"}, "{}", "12"),
        ({"properties": ADDS}, '{"a": 1}', '["a"]'),
        ({"type": ["object", "null"], "properties": ADDS}, '{"a": 1}', "null"),
        ({"anyOf": [{"type": "integer"}, {"properties": ADDS}]}, '{"a": 1}', "12"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": ADDS}}}, '{"a": 1}', "12"),
    ],
)
def test_arguments_are_an_object(parameters: dict[str, Any], follows: str, fails: str) -> None:
    """Our own template has nothing between name and arguments, so `add12` would be a name."""
    tools = (ToolSpec(name="add", parameters=json.dumps(parameters)),)
    for chat, form in (
        (chat_of(), "<|tool|>add%s"),
        (chat_of(TAGGED), '<tool_call>{"name": "add", "arguments": %s}</tool_call>'),
    ):
        assert is_followed(chat, CALL, form % follows, tools=tools)
        assert not is_followed(chat, CALL, form % fails, tools=tools)


def test_a_call_whose_arguments_are_no_object_is_refused() -> None:
    tools = (ToolSpec(name="add", parameters='{"type": "string"}'),)
    with pytest.raises(UserCodeError, match=r'call of add .* the type "string"; arguments'):
        is_followed(chat_of(), CALL, "", tools=tools)


def test_json_has_one_form_of_white_space() -> None:
    assert is_followed(chat_of(TAGGED), FORMAT, '{"a": 1}')
    assert not is_followed(chat_of(TAGGED), FORMAT, '{"a":1}')
    assert not is_followed(chat_of(TAGGED), FORMAT, '{ "a": 1}')


def test_reasoning_may_come_first_where_the_template_knows_it() -> None:
    chat = chat_of(THINKING)
    assert is_followed(chat, FORMAT, '<think>hm {"a" </think>\n\n{"a": 1}')
    assert is_followed(chat, FORMAT, '{"a": 1}')
    assert not is_followed(chat, FORMAT, '<think>hm {"a": 1}')
    assert not is_followed(chat_of(TAGGED), FORMAT, '<think>hm</think>{"a": 1}')


def test_reasoning_that_the_prompt_has_begun_must_end() -> None:
    chat = chat_of(OPEN)
    assert is_followed(chat, FORMAT, 'hm</think>{"a": 1}')
    assert not is_followed(chat, FORMAT, '{"a": 1}')


def test_a_call_in_a_form_that_our_parser_does_not_read_is_refused() -> None:
    other = TAGGED.replace("<tool_call>{{ call.function | tojson }}</tool_call>", "<call/>")
    with pytest.raises(UserCodeError, match="no tools, or calls in a form"):
        is_followed(chat_of(other), CALL, "")
    hidden = TAGGED.replace("{{ call.function | tojson }}", "{{ call.function.name }}")
    with pytest.raises(UserCodeError, match="calls of tools in a form that cannot be forced"):
        is_followed(chat_of(hidden), CALL, "")


def test_the_largest_schema_of_any_characters_fits() -> None:
    """A character that JSON may escape counts once."""
    large = {"const": 1, "description": "\u4f60" * 65_000, "title": "\u2028\u0001\n%json {}"}
    constraint = Constraint(json_schema=json.dumps(large, ensure_ascii=False))
    assert is_followed(chat_of(TAGGED), constraint, "1")


def test_a_schemas_own_guidance_is_not_obeyed() -> None:
    """Nor can it break out of the grammar that it is part of."""
    free = json.loads(SCHEMA) | {"x-guidance": {"whitespace_flexible": True}}
    free["description"] = '"}\nstart: /.*/\n'
    constraint = Constraint(json_schema=json.dumps(free))
    assert is_followed(chat_of(TAGGED), constraint, '{"a": 1}')
    assert not is_followed(chat_of(TAGGED), constraint, '{"a":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 99999989},
        {"multipleOf": 1023e6},
        {"anyOf": [{"multipleOf": 0}, {"multipleOf": 99999989}]},
        {"multipleOf": 2.0000003},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"$ref": "#/$defs/a", "multipleOf": 991, "$defs": {"a": {"multipleOf": 997}}},
        {"items": {"multipleOf": 10**400 + 1}},
    ],
)
def test_a_multiple_that_takes_too_long_is_refused(schema: dict[str, object]) -> None:
    """Nothing else would end it: it would hold up the answers of all others, and take all memory."""
    with pytest.raises(UserCodeError, match="multipleOf is more than 4096"):
        is_followed(chat_of(TAGGED), Constraint(json_schema=json.dumps(schema)), "")


def test_a_number_is_a_multiple() -> None:
    for multiple, text, follows in (
        (3600, "7200", True),
        (3600, "3601", False),
        (0.05, "0.15", True),
        (0.05, "0.16", False),
        (0.00001, "0.00003", True),
    ):
        schema = {"type": "number", "multipleOf": multiple}
        constraint = Constraint(json_schema=json.dumps(schema))
        assert is_followed(chat_of(TAGGED), constraint, text) is follows


def chain(length: int) -> Constraint:
    """Definitions that each hold the next one, in the keywords that take the most of the stack."""
    parts: dict[str, Any] = {"last": {"const": 1}}
    for number in range(length):
        after = {"$ref": f"#/$defs/{number + 1 if number + 1 < length else 'last'}"}
        parts[str(number)] = {"allOf": [{"properties": {"a": after}}, {"properties": {"b": {}}}]}
    return Constraint(json_schema=json.dumps({"$ref": "#/$defs/0", "$defs": parts}))


def test_a_schema_that_takes_the_whole_stack_is_refused() -> None:
    """It would kill the process, and with it the answers of all others."""
    with pytest.raises(UserCodeError, match=r"600 different \$ref .* 3604 levels, and 1024"):
        is_followed(chat_of(TAGGED), chain(599), "")
    assert is_followed(chat_of(TAGGED), chain(168), "[]")


def test_many_flat_definitions_are_followed() -> None:
    """Such as the union of all actions that an agent may take."""
    parts = {f"a/{n}": {"type": "object", "properties": {"n": {"const": n}}} for n in range(250)}
    choices = [{"$ref": f"#/$defs/a~1{n}"} for n in range(250)]
    inner = {"type": "array", "items": {"anyOf": choices}}
    constraint = Constraint(json_schema=json.dumps({**inner, "$defs": parts}))
    assert is_followed(chat_of(TAGGED), constraint, '[{"n": 249}]')
    assert not is_followed(chat_of(TAGGED), constraint, '[{"n": 250}]')


@pytest.mark.parametrize(
    "reference",
    ["#/anyOf/9", "#/anyOf/000000000999999", f"#/anyOf/{'9' * 5000}", "#/anyOf/-1", "#/a/b/c", "x"],
)
def test_a_reference_that_names_nothing_is_refused(reference: str) -> None:
    schema = {"anyOf": [{"$ref": reference}, {"type": "null"}]}
    constraint = Constraint(json_schema=json.dumps(schema))
    with pytest.raises(UserCodeError, match="cannot be followed"):
        is_followed(chat_of(TAGGED), constraint, "null")


def test_many_names_of_one_part_cost_what_it_costs() -> None:
    wide = {"enum": list(range(20_000))}
    names = [{"$ref": "#/$defs/" + "%61" * n + "a" * (900 - n)} for n in range(900)]
    schema = {"anyOf": names, "$defs": {"a" * 900: wide}}
    began = time.process_time()
    _refuse_long_ways(schema)
    assert time.process_time() - began < 2


def test_an_object_has_the_properties_that_it_lists() -> None:
    """Unless its schema allows others; the parts of an `allOf` are left as they are."""
    inner = {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}
    properties = {"properties": {"type": "array", "items": inner}}
    listed = {"type": "object", "properties": properties, "required": ["properties"]}
    chat = chat_of(TAGGED)
    constraint = Constraint(json_schema=json.dumps(listed))
    assert is_followed(chat, constraint, '{"properties": [{"b": 1}]}')
    assert not is_followed(chat, constraint, '{"properties": [{"b": 1, "c": 2}]}')
    assert not is_followed(chat, constraint, '{"properties": [], "c": 2}')
    opened = Constraint(json_schema=json.dumps(listed | {"additionalProperties": True}))
    assert is_followed(chat, opened, '{"properties": [], "c": 2}')
    parts = [inner, {"type": "object", "properties": {"c": {"const": 2}}, "required": ["c"]}]
    both = Constraint(json_schema=json.dumps({"allOf": parts}))
    assert is_followed(chat, both, '{"b": 1, "c": 2}')


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("constraint", [FORMAT, Constraint(calls=("sub",))], ids=["format", "call"])
def test_an_answer_has_the_form_of_its_family(name: str, constraint: Constraint) -> None:
    """Tokens that are drawn at random from the allowed ones are an answer that the family's renderer
    reads."""
    chat, draws = family_chat(name), Random(3)
    prompt = chat.family_ids(QUESTION, TOOLS, reply_next=True)
    assert prompt is not None
    tokens = range(len(chat._tokenizer))
    vocabulary = GrammarVocabulary(chat._tokenizer, chat._stop_ids, size=len(tokens))
    state = vocabulary.start(answer_grammar(constraint, TOOLS, chat, prompt))
    ids: list[int] = []
    while not ids or ids[-1] not in chat._stop_ids:
        ids.append(draws.choice([token for token in tokens if is_allowed(state.allowed, token)]))
        state.advance(ids[-1], is_last=ids[-1] in chat._stop_ids)
    answer = chat.answer(ids, chat.decode(ids), prompt_ids=prompt, tools=TOOLS)
    assert answer is not None
    assert [call.name for call in answer.tool_calls] == list(constraint.calls)
    text = answer.tool_calls[0].arguments if answer.tool_calls else answer.content
    assert list(json.loads(text)) == ["a"]


def is_followed_by_vllm(chat: Chat, text: str, names: Mapping[str, int]) -> bool:
    """Whether the grammar of a call allows this text as the whole answer, as vLLM reads both."""
    vocabulary = VllmVocabulary(chat._tokenizer, chat._stop_ids, size=len(chat._tokenizer))
    grammar = answer_grammar(CALL, TOOLS, chat, (), names=names, ends=vocabulary.ends)
    assert grammar.startswith("%llguidance {}\n")
    state = vocabulary.start(grammar)
    try:
        for token in chat.encode(text):
            state.advance(token, is_last=token in vocabulary.ends)
    except UserCodeError:
        return False
    return state.to_record().vocabulary == "vllm"


def test_a_grammar_for_vllm_names_the_tokens_that_are_no_text_there() -> None:
    """Twin: without their ids, nothing may follow the token that begins a call."""
    name = "Qwen/Qwen3-4B"
    chat = family_chat(name)
    vocabulary = VllmVocabulary(chat._tokenizer, chat._stop_ids, size=len(chat._tokenizer))
    framing = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    assert vocabulary.names == {token: chat.encode(token)[0] for token in framing}
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call><|im_end|>'
    assert is_followed_by_vllm(chat, text, vocabulary.names)
    assert not is_followed_by_vllm(chat, text, {})


def test_a_grammar_for_vllm_ends_with_any_token_that_ends_a_turn() -> None:
    chat = family_chat("meta-llama/Llama-3.2-1B-Instruct")
    ends = [chat.encode(name)[0] for name in ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")]
    vocabulary = VllmVocabulary(chat._tokenizer, frozenset(ends), size=len(chat._tokenizer))
    state = vocabulary.start(
        answer_grammar(FORMAT, (), chat, (), names=vocabulary.names, ends=vocabulary.ends)
    )
    for token in chat.encode('{"a": 1}'):
        assert not any(is_allowed(state.allowed, end) for end in ends)
        state.advance(token)
    assert all(is_allowed(state.allowed, end) for end in ends)


def test_the_record_of_our_own_masks_does_not_name_their_vocabulary() -> None:
    chat = chat_of(TAGGED)
    state = GrammarVocabulary(chat._tokenizer, chat._stop_ids, size=103).start('start: "a"')
    state.advance(chat.encode("a")[0])
    assert set(state.to_record().model_dump()) == {"text", "masks_sha256"}
