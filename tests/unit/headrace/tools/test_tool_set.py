"""Whatever a call asks for, and whatever the tool does, is a bounded text for the model."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.attempt_output import MOST_OF_TOOLS, AttemptOutput, running
from headrace.tools import tool_set, worker_threads
from headrace.tools.function_tool import LONGEST_RESULT, tool
from headrace.tools.results import LONGEST_ERROR, result_text
from headrace.tools.tool_set import ToolSet, UnusableTools, offered_tools
from headrace.user_code.discovery import load


def reply(*calls: tuple[object, object]) -> dict[str, object]:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


async def texts(tools: list[Any], *calls: tuple[object, object]) -> list[str]:
    answers = await ToolSet(offered_tools(tools)).answer(reply(*calls), context="context")
    assert [answer["tool_call_id"] for answer in answers] == [f"c{n}" for n in range(len(calls))]
    assert {answer["role"] for answer in answers} <= {"tool"}
    return [str(answer["content"]) for answer in answers]


@tool
def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    return left + right


@tool
async def double(of: int) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"twice": 2 * of}


async def test_calls_are_answered_in_their_order() -> None:
    asked = (("add", '{"left": 2}'), ("double", '{"of": 4}'), ("add", '{"left": 1, "right": 5}'))
    assert await texts([add, double], *asked) == ["3", '{"twice": 8}', "6"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("sub", "{}", "error: there is no tool 'sub'; the tools are: add"),
        ("x" * 10_000, "{}", "error: there is no tool 'xxx"),
        (None, "{}", "error: there is no tool ''"),
        ("add", "{", "error: add: the arguments are not JSON"),
        ("add", "[1]", "error: add: the arguments are not a JSON object"),
        ("add", '{"left": NaN}', "error: add: the arguments are not JSON: NaN"),
        ("add", "[" * 100_000, "error: add: the arguments are nested too deeply"),
        ("add", '{"left": ' + "9" * 5000 + "}", "error: add: the arguments are not JSON"),
        ("add", '{"left": "' + "x" * (2 << 20) + '"}', "error: add: the arguments have 2097"),
        ("add", None, "error: add: the arguments are missing"),
        ("add", "", "error: add: the arguments lacks left"),
        ("add", '{"left": "two"}', "error: add: left must be an integer, got 'two'"),
    ],
)
async def test_a_bad_call_is_an_error_for_the_model(name: Any, arguments: Any, says: str) -> None:
    [text] = await texts([add], (name, arguments))
    assert text.startswith(says)
    assert len(text) <= LONGEST_ERROR


class Rude(Exception):
    def __str__(self) -> str:
        raise KeyError


def raises(error: BaseException) -> list[Any]:
    def sync() -> None:
        raise error

    async def later() -> None:
        raise error

    return [sync, later]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 100_000),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        StopIteration(),
        TimeoutError(),
        RecursionError(),
        Rude(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_exception_of_a_tool_is_an_error_for_the_model(error: BaseException) -> None:
    for text in await texts(raises(error), ("sync", "{}"), ("later", "{}")):
        assert text.startswith("error: ")
        assert type(error).__name__ in text
        assert len(text) <= LONGEST_ERROR


class Plain:
    """No JSON."""


def nested() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def circle() -> list[Any]:
    around: list[Any] = []
    around.append(around)
    return around


@pytest.mark.parametrize(
    ("value", "begins"),
    [
        (None, "null"),
        ("text \ud800", "text ?"),
        (b"\xff" * (10 << 20), "\ufffd"),
        ("x" * (10 << 20), "xxx"),
        (["x" * 1000] * 10_000, '["xxx'),
        ({"a": {1, 2}}, '{"a": [1, 2]}'),
        (Plain(), "error: the result of give is Plain, which is not JSON"),
        ({Plain(): 1}, "error: the result of give is dict"),
        (nested(), "error: the result of give is list"),
        (circle(), "error: the result of give is list"),
        (10**5000, "error: the result of give is int"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_result_is_bounded(value: Any, begins: str) -> None:
    def give() -> Any:
        return value

    [text] = await texts([give], ("give", "{}"))
    assert text.startswith(begins)
    assert len(text) <= LONGEST_RESULT
    assert text.encode()


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What a hanging function waits for."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_call_that_hangs_is_left_behind(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_set, "ABANDON_S", 0.02)

    @tool(timeout_s=0.02)
    def sync() -> None:
        held.wait()

    @tool(timeout_s=0.02)
    async def patient() -> None:
        await asyncio.Event().wait()

    @tool(timeout_s=0.02)
    async def stubborn() -> None:
        while not held.is_set():
            try:
                await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                continue

    asked = [(name, "{}") for name in ("sync", "patient", "stubborn")]
    for name, text in zip(
        ("sync", "patient", "stubborn"),
        await texts([sync, patient, stubborn], *asked),
        strict=True,
    ):
        assert f"{name} did not return within 0.02 s" in text
    held.set()


async def test_hanging_threads_are_counted(
    held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_threads, "MOST_THREADS", 3)

    @tool(timeout_s=0.01)
    def hang() -> None:
        held.wait()

    said = await texts([hang], *[("hang", "{}")] * 5)
    assert "hang did not return within 0.01 s" in said[0]
    assert "calls of tools have not returned" in said[-1]


async def test_async_calls_run_together_and_others_in_order() -> None:
    both = asyncio.Barrier(2)
    seen: list[int] = []

    @tool(timeout_s=5)
    async def meet() -> str:
        await both.wait()
        return "met"

    def note(number: int) -> None:
        seen.append(number)

    asked = [
        ("meet", "{}"),
        *(("note", json.dumps({"number": n})) for n in range(5)),
        ("meet", "{}"),
    ]
    said = await texts([meet, note], *asked)
    assert (said[0], said[-1]) == ("met", "met")
    assert seen == [*range(5)]


async def test_one_answer_makes_a_bounded_number_of_calls() -> None:
    said = await texts([add], *[("add", '{"left": 1}')] * (tool_set.MOST_CALLS + 2))
    assert set(said[: tool_set.MOST_CALLS]) == {"2"}
    assert all(text.startswith("error: one answer may make") for text in said[-2:])


def test_tools_that_cannot_be_offered_together_are_refused() -> None:
    def named(name: str) -> Any:
        def function(value: int) -> None: ...

        return tool(name=name)(function)

    with pytest.raises(UnusableTools, match="two tools with the name add"):
        ToolSet(offered_tools([add, named("add")]))
    with pytest.raises(UnusableTools, match="there are 129 tools"):
        ToolSet(offered_tools([named(f"t{n}") for n in range(129)]))
    wide = tool(description="x" * tool_set.LARGEST_SCHEMAS)(named("wide"))
    with pytest.raises(UnusableTools, match="schemas of the tools have"):
        ToolSet(offered_tools([wide]))
    with pytest.raises(UnusableTools, match="give functions"):
        offered_tools(["add"])
    with pytest.raises(UnusableTools, match="must be a list"):
        offered_tools("add")


async def test_methods_belong_to_the_workflow_of_their_attempt() -> None:
    class Owner:
        count = 0

        @tool
        def count_up(self, by: int) -> int:
            self.count += by
            return self.count

    tools = ToolSet(offered_tools([Owner.count_up, add]))
    first, second = Owner(), Owner()
    for owner, expected in ((first, "3"), (first, "6"), (second, "3")):
        [text] = await tools.bind(owner).answer(reply(("count_up", '{"by": 3}')), context=None)
        assert text["content"] == expected


CALLS = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "function", "name", "arguments"]), inner, max_size=4
        )
    ),
    max_leaves=10,
)


@given(calls=CALLS)
def test_no_form_of_calls_raises(calls: object) -> None:
    made = asyncio.run(ToolSet(offered_tools([add])).answer({"tool_calls": calls}, context=None))
    assert all(isinstance(one["content"], str) for one in made)


@given(value=st.text(), most=st.integers(1, 60))
def test_a_text_is_never_longer_than_its_bound(value: str, most: int) -> None:
    assert len(result_text(value, most=most)) <= most


RAISING = """
import json
from headrace.tools import ToolError, tool

@tool
def parse(text: str) -> str:
    return json.loads(text)

@tool
def fail(why: str) -> str:
    raise ValueError(why)

@tool
async def refuse() -> str:
    raise ToolError("only for the model")
"""


async def test_the_traceback_of_a_tool_is_kept_and_the_model_gets_the_text_alone(
    tmp_path: Path,
) -> None:
    main = tmp_path / "rollouts" / "say" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text(RAISING)
    module = load(main)
    output = AttemptOutput(main)
    running.set(output)
    offered = [module.parse, module.refuse]
    said = await texts(offered, ("parse", '{"text": "{"}'), ("refuse", "{}"))
    assert said[0].startswith("error: parse raised JSONDecodeError: Expecting property name")
    assert "main.py" not in said[0]
    kept = str((output.document() or {})["traceback"])
    assert 'File "rollouts/say/main.py", line 7, in parse' in kept
    assert "json/decoder" not in kept, "frames of libraries are left out"
    assert "only for the model" not in kept
    for number in range(99):
        await texts([module.fail], ("fail", f'{{"why": "{number}{"x" * 200}"}}'))
    document = output.document() or {}
    assert len(document["traceback"]) <= MOST_OF_TOOLS + 200
    assert document["is_cut"]
    output.fail(ValueError("the end of the attempt"), main)
    assert str((output.document() or {})["traceback"]).endswith("the end of the attempt")
