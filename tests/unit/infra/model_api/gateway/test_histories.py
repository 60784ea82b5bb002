"""Histories that frameworks resend are matched to the recorded turns."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.model_api.gateway.histories import Histories, canonical_json
from schemas.sampling import Message, ToolCall, ToolSpec

ASK = Message(role="user", content="17 + 25?")
CALL = ToolCall(id="c1", name="add", arguments='{ "a": 17,\n "b": 25.0 }')
CALLS = Message(role="assistant", content="\n", reasoning="I add.", tool_calls=(CALL,))
RESULT = Message(role="tool", content="42", tool_call_id="c1")
TOOL = ToolSpec(name="add", description="Adds.", parameters='{"type": "object"}')


@dataclass
class Recorded:
    conversation: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = (TOOL,)


def histories(*recorded: Recorded) -> Histories[Recorded]:
    made: Histories[Recorded] = Histories()
    for one in recorded:
        made.add(one)
    return made


FIRST = Recorded((ASK, CALLS))


def test_the_recorded_answer_takes_the_place_of_the_one_that_was_resent() -> None:
    """The framework gave the call another id, wrote its arguments again and dropped the reasoning."""
    call = ToolCall(id="new", name="add", arguments='{"b":25,"a":17}')
    resent = Message(role="assistant", content="", tool_calls=(call,))
    heard = Message(role="tool", content="42", tool_call_id="new", name="add")
    tool = TOOL.model_copy(update={"parameters": '{"type":"object"}'})
    found, messages, tools = histories(FIRST).find_history((ASK, resent, heard), (tool,))
    assert found is FIRST
    assert messages == (ASK, CALLS, heard.model_copy(update={"tool_call_id": "c1"}))
    assert tools == (TOOL,)


@pytest.mark.parametrize(
    "resent",
    [
        Message(role="assistant", content="edited", tool_calls=(CALL,)),
        Message(role="assistant", content=""),
        CALLS.model_copy(update={"tool_calls": (CALL, CALL)}),
        CALLS.model_copy(update={"tool_calls": (CALL.model_copy(update={"name": "sub"}),)}),
        CALLS.model_copy(update={"tool_calls": (CALL.model_copy(update={"arguments": "{}"}),)}),
        CALLS.model_copy(update={"role": "user"}),
    ],
)
def test_an_edited_answer_is_another_conversation(resent: Message) -> None:
    messages = (ASK, resent, RESULT)
    assert histories(FIRST).find_history(messages, (TOOL,)) == (None, messages, (TOOL,))


@pytest.mark.parametrize("tools", [(), (TOOL, TOOL.model_copy(update={"name": "sub"}))])
def test_other_tools_are_another_conversation(tools: tuple[ToolSpec, ...]) -> None:
    assert histories(FIRST).find_history((ASK, CALLS, RESULT), tools)[0] is None


def test_the_longest_and_newest_recorded_conversation_is_continued() -> None:
    second = Recorded((ASK, CALLS, RESULT, Message(role="assistant", content="42")))
    again = Recorded((ASK, CALLS))
    more = (*second.conversation, Message(role="user", content="thanks"))
    known = histories(FIRST, second, again)
    assert known.find_history(more, (TOOL,))[0] is second
    assert known.find_history((ASK, CALLS, RESULT), (TOOL,))[0] is again
    assert known.find_history((ASK, CALLS), (TOOL,))[0] is None, (
        "the policy answers something after it"
    )
    assert known.find_history((ASK,), (TOOL,))[0] is None


def test_a_history_without_its_beginning_is_another_conversation() -> None:
    assert histories(FIRST).find_history((CALLS, RESULT), (TOOL,))[0] is None


FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(VALUES)
def test_json_that_was_parsed_and_written_again_is_the_same(value: object) -> None:
    forms = [json.dumps(value), json.dumps(value, indent=2), json.dumps(value, ensure_ascii=False)]
    assert len({canonical_json(form) for form in forms}) == 1
    assert json.loads(canonical_json(forms[0])) == value


@pytest.mark.parametrize("text", ["not json", "{", "[" * 100_000, "1" * 5000, '{"a": 1e999}'])
def test_any_text_has_a_canonical_form(text: str) -> None:
    assert canonical_json(text)
