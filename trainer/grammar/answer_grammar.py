"""The grammar of a constrained answer, in the syntax of the model's own family.

How a family writes content and calls is read off its chat template. The template writes a probe, and the
grammar has the text that it writes around the probe. A call is forced only if our parser finds the probe
in what the template wrote. So a forced answer is read by the code that reads every answer.

Where the template knows reasoning (`<think>`), it may come first, and is free text. JSON has the form of
Python's `json.dumps`, with one space after a comma and a colon, because a model that may write any white
space can go on with it forever. An object that lists its properties has no others, as in the strict mode
of OpenAI, for the same reason.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import unquote

from schemas.errors import FailureCategory, UserCodeError
from schemas.models.constraints import Constraint
from schemas.sampling import Message, ToolCall, ToolSpec
from trainer.model.chat_template import Chat

PROBE = "headrace-probe"
ARGUMENTS = re.compile(r'\{\s*"headrace_probe"\s*:\s*1\s*\}')
QUESTION = Message(role="user", content="?")
GUIDANCE = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
OPEN = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "$ref"}
)
"""Keywords of an object that may have other properties than those that it lists."""
LARGEST_MULTIPLE = 4096
"""The largest least common multiple of all `multipleOf` of a schema, in units of the last decimal place.
llguidance makes a state for each remainder, and none of its limits ends that: 999,983 takes half a
minute and 350 MB."""
MOST_LEVELS = 1024
"""The most levels of a schema with all that its `$ref` lead through. llguidance goes down them on the
stack, and none of its limits ends that: on the 8 MiB of a thread it followed 2,700 levels of each
keyword, and 4,000 killed the process."""
LONGEST_PLACE = 9
"""Digits of a place in a list that a reference may have."""
SPECIAL = re.compile("\ue000([0-9]+)\ue001")
"""A special token in a text, by its id."""
FOR_LLGUIDANCE = "%llguidance {}"
"""The first line of a grammar for vLLM. xgrammar takes a grammar without it, and reads another one."""
REASONING_BLOCK = re.compile(r"\s*<think>\s*</think>\s*")


def answer_grammar(
    constraint: Constraint,
    tools: Sequence[ToolSpec],
    chat: Chat,
    prompt_ids: Sequence[int],
    *,
    names: Mapping[str, int] | None = None,
    ends: Sequence[int] = (),
) -> str:
    """The grammar of the answer to a prompt, as llguidance reads it. `names` and `ends` are those of the
    vocabulary (`token_masks.py`). Raises UserCodeError where the model's chat template has no syntax
    that can be forced."""
    names = names or {}
    forms: list[str] = []
    if constraint.json_schema is not None:
        before, after = (_lark(text, names) for text in _around_content(chat))
        forms.append(f"{before} {_json_rule(constraint.json_schema)} {after}")
    called = [tool for tool in tools if tool.name in constraint.calls]
    if called:
        before, between, after = (
            _lark(text, names) for text in _around_call(called[0], tools, chat)
        )
        calls = " | ".join(
            f"{_literal(tool.name)} {between} {_json_rule(_of_objects(tool))}" for tool in called
        )
        forms.append(f"{before} ({calls}) {after}")
    thinking, rules = _reasoning(chat, prompt_ids, names)
    head = (FOR_LLGUIDANCE,) if ends else ()
    end = f" ({' | '.join(f'<[{number}]>' for number in ends)})" if ends else ""
    return "\n".join((*head, f"start: {thinking} ({' | '.join(forms)}){end}", *rules))


def _json_rule(schema: str) -> str:
    read = json.loads(schema)
    _refuse_large_multiples(read)
    _refuse_long_ways(read)
    return f"%json {json.dumps(_close_objects(read) | GUIDANCE, ensure_ascii=False)}"


def _of_objects(tool: ToolSpec) -> str:
    """The schema of a tool's arguments, which are an object whether or not it says so. Without any
    parameters, they are an empty one."""
    schema = json.loads(tool.parameters) or {"properties": {}}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise UserCodeError(
            FailureCategory.VALIDATION,
            f"a call of {tool.name} cannot be forced, because its parameters have the type "
            f"{json.dumps(kind)[:80]}; arguments are an object, so write one",
        )
    return json.dumps(schema | {"type": "object"}, ensure_ascii=False)


def _refuse_large_multiples(schema: Any) -> None:
    """Numbers that `allOf` and `$ref` combine must be a multiple of each, so all are looked at
    together."""
    found = list(_multiples(schema))
    places = max((digits for _, digits in found), default=0)
    if lcm(*(number * 10 ** (places - digits) for number, digits in found)) > LARGEST_MULTIPLE:
        raise UserCodeError(
            FailureCategory.VALIDATION,
            "the answer's JSON schema cannot be followed: the least common multiple of its "
            f"multipleOf is more than {LARGEST_MULTIPLE}, in units of the last decimal place; leave "
            "out multipleOf, and check the number in your code",
        )


def _multiples(value: Any) -> Iterator[tuple[int, int]]:
    """Each `multipleOf` in a value, as a whole number and how many of its digits are decimal places."""
    if isinstance(value, dict):
        number = value.get("multipleOf")
        if type(number) in (int, float) and (exact := Decimal(repr(number))).is_finite():
            whole, _, decimals = f"{abs(exact):f}".partition(".")
            decimals = decimals.rstrip("0")
            if found := int(whole + decimals):
                yield found, len(decimals)
    for child in _children(value):
        yield from _multiples(child)


def _refuse_long_ways(schema: Any) -> None:
    """A way through a schema passes each `$ref` once, and at most all levels of what it names."""
    references = {
        reference
        for level in _levels(schema)
        for one in level
        if isinstance(one, dict) and isinstance(reference := one.get("$ref"), str)
    }
    # By identity, so that many names of one part do not make it be measured many times.
    named = {id(part): part for part in (_find(schema, reference) for reference in references)}
    heights = {place: sum(1 for _ in _levels(part)) for place, part in named.items()}
    longest = sum(1 for _ in _levels(schema)) + sum(heights.values())
    if longest > MOST_LEVELS:
        raise UserCodeError(
            FailureCategory.VALIDATION,
            f"the answer's JSON schema cannot be followed: with {len(references)} different $ref it may "
            f"lead through {longest} levels, and {MOST_LEVELS} are the most; use fewer definitions",
        )


def _levels(schema: Any) -> Iterator[list[Any]]:
    """The values that are 1, 2 and more levels deep in a value, beginning with itself."""
    level = [schema]
    while level:
        yield level
        level = [child for one in level for child in _children(one)]


def _find(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference names, or all of the schema for a reference of another
    kind."""
    start, *names = unquote(reference).split("/")
    found = schema if start == "#" else None
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            is_place = key.isdecimal() and len(key) <= LONGEST_PLACE and int(key) < len(found)
            found = found[int(key)] if is_place else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return schema if found is None else found


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _close_objects(schema: Any) -> Any:
    """The schema, in which an object that lists its properties has no others, unless it says so. What
    `allOf` combines stays as it is, because each part lists only some of them."""
    if not isinstance(schema, dict) or "allOf" in schema:
        return schema
    made = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            made[key] = {name: _close_objects(inner) for name, inner in schema[key].items()}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            made[key] = [_close_objects(inner) for inner in schema[key]]
    if "items" in schema:
        made["items"] = _close_objects(schema["items"])
    if "properties" in schema and not schema.keys() & OPEN:
        made["additionalProperties"] = False
    return made


def _around_content(chat: Chat) -> tuple[str, str]:
    """The text that the template writes before and after the content of an answer."""
    text = _write_reply(chat, Message(role="assistant", content=PROBE), ())
    before, found, after = text.partition(PROBE)
    if not found:
        raise _not_forced("an answer's content")
    return REASONING_BLOCK.sub("", before), after


def _around_call(tool: ToolSpec, tools: Sequence[ToolSpec], chat: Chat) -> tuple[str, str, str]:
    """The text that the template writes before the name of a call, between name and arguments, and after
    them."""
    call = ToolCall(id="call_0", name=tool.name, arguments='{"headrace_probe": 1}')
    reply = Message(role="assistant", content="", tool_calls=(call,))
    text = _write_reply(chat, reply, tools)
    found = ARGUMENTS.search(text)
    start = text.rfind(tool.name, 0, found.start()) if found else -1
    if found is None or start < 0 or not _is_parsed(chat, reply, tools):
        raise _not_forced("calls of tools")
    before = REASONING_BLOCK.sub("", text[:start])
    between = text[start + len(tool.name) : found.start()]
    return before, between, text[found.end() :]


def _is_parsed(chat: Chat, reply: Message, tools: Sequence[ToolSpec]) -> bool:
    """Whether our parser reads the call out of what the template wrote."""
    ids = chat.reply_ids((QUESTION,), reply, tools=tools)
    answer = chat.answer(ids, chat.decode(ids), prompt_ids=(), tools=tools)
    calls = answer.tool_calls if answer else ()
    return [call.name for call in calls] == [reply.tool_calls[0].name] and (
        ARGUMENTS.fullmatch(calls[0].arguments) is not None
    )


def _write_reply(chat: Chat, reply: Message, tools: Sequence[ToolSpec]) -> str:
    """The reply as the template writes it after a question, with its special tokens by their ids."""
    parts: list[str] = []
    text: list[int] = []
    for number in chat.reply_ids((QUESTION,), reply, tools=tools):
        if chat.is_special(number):
            parts += [chat.decode(text), f"\ue000{number}\ue001"]
            text = []
        else:
            text.append(number)
    return "".join((*parts, chat.decode(text)))


def _lark(text: str, names: Mapping[str, int]) -> str:
    """A text with special tokens, as a sequence of Lark."""
    for name, number in names.items():
        text = text.replace(name, f"\ue000{number}\ue001")
    texts, ids = SPECIAL.split(text)[::2], SPECIAL.findall(text)
    parts = [_literal(texts[0])]
    for number, rest in zip(ids, texts[1:], strict=True):
        parts += [f"<[{number}]>", _literal(rest)]
    return " ".join(part for part in parts if part)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _reasoning(
    chat: Chat, prompt_ids: Sequence[int], names: Mapping[str, int]
) -> tuple[str, tuple[str, ...]]:
    """The part of a grammar that comes before the answer, and the rules that it needs. Reasoning that
    the prompt has begun must come to its end."""
    if not chat.has_reasoning:
        return "", ()
    end = names.get("</think>") or chat.mark("</think>")
    closed = f"thought: /(?s:.*)/ <[{end}]>" if end else 'thought[suffix="</think>"]: /(?s:.*)/'
    if chat.has_open_reasoning(prompt_ids):
        return r"thought /\s*/", (closed,)
    begin = names.get("<think>") or chat.mark("<think>")
    begun = f"<[{begin}]>" if begin else '"<think>"'
    return "reasoning?", (rf"reasoning: {begun} thought /\s*/", closed)


def _not_forced(what: str) -> UserCodeError:
    return UserCodeError(
        FailureCategory.VALIDATION,
        f"the model's chat template writes {what} in a form that cannot be forced; leave out "
        "tool_choice and response_format, or use a model with <tool_call> in its template",
    )
