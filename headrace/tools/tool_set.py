"""The tools of a workflow, and the calls that a model makes of them.

A call is data: whatever is wrong with it, and whatever the tool does, becomes the text of its answer. It
never fails the sample. The traceback of a tool that raises is kept with the sample, for its author.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.attempt_output import fail_tool_running
from headrace.tools.argument_types import ArgumentMismatch
from headrace.tools.function_tool import FunctionTool, OfferedTool, function_tool, marked_tool
from headrace.tools.results import ToolError, error_text, result_text

ChatMessage = dict[str, object]

MOST_TOOLS = 128
MOST_CALLS = 64
"""Calls in one answer of the model that are made. The others get an error."""

LONGEST_ARGUMENTS = 1 << 20
LARGEST_SCHEMAS = 256 << 10
"""Bytes of the JSON of all tools together."""

NAMES_SHOWN = 20
ABANDON_S = 0.5
"""How long a call that is over its time may take to end. Then it is left behind."""


class UnusableTools(ValueError):
    """Tools cannot be offered together; the text says why."""


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A call that an answer of the model asks for."""

    id: str
    name: str
    arguments: object


class ToolSet:
    """Tools by name. It is empty by default, and then false."""

    def __init__(self, tools: Iterable[OfferedTool] = ()) -> None:
        """Raises UnusableTools for two tools of one name, too many tools, or too large schemas."""
        self._tools: dict[str, OfferedTool] = {}
        for one in tools:
            if self._tools.get(one.name, one) is not one:
                raise UnusableTools(
                    f"there are two tools with the name {one.name}; rename one of them"
                )
            self._tools[one.name] = one
        if len(self._tools) > MOST_TOOLS:
            raise UnusableTools(
                f"there are {len(self._tools)} tools; offer at most {MOST_TOOLS} of them"
            )
        self.specs = [_spec(one) for one in self._tools.values()]
        size = len(json.dumps(self.specs)) if self.specs else 0
        if size > LARGEST_SCHEMAS:
            raise UnusableTools(
                f"the schemas of the tools have {size} bytes; keep them below {LARGEST_SCHEMAS}"
            )

    def __iter__(self) -> Iterator[OfferedTool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def bind(self, owner: object) -> "ToolSet":
        """Return the tools with its methods bound to `owner`, which is the workflow of one attempt."""
        tools = self._tools
        methods = {
            name: one.bind(owner)
            for name, one in tools.items()
            if isinstance(one, FunctionTool) and one.is_method
        }
        if not methods:
            return self
        bound = ToolSet()
        bound._tools = {**tools, **methods}
        bound.specs = self.specs
        return bound

    async def answer(self, reply: Mapping[str, object], *, context: object) -> list[ChatMessage]:
        """Make the calls that a reply of the model asks for, and return the messages with their results,
        in the order of the calls. Calls of async functions run at the same time, and calls of other
        functions one after the other."""
        calls = requested_calls(reply)
        texts: list[str] = [""] * len(calls)

        async def make(number: int) -> None:
            if number >= MOST_CALLS:
                texts[number] = error_text(f"one answer may make at most {MOST_CALLS} calls")
                return
            texts[number] = await self._text_of(calls[number], context)

        async def make_in_order(numbers: Sequence[int]) -> None:
            for number in numbers:
                await make(number)

        apart = [n for n, call in enumerate(calls) if self._is_async(call)]
        ordered = [n for n, call in enumerate(calls) if not self._is_async(call)]
        if len(apart) + bool(ordered) == 1:
            await make_in_order(apart or ordered)
        else:
            await asyncio.gather(make_in_order(ordered), *(make(number) for number in apart))
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name[:64], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    def _is_async(self, call: RequestedCall) -> bool:
        found = self._tools.get(call.name)
        return found is not None and found.is_async

    async def _text_of(self, call: RequestedCall, context: object) -> str:
        """Make one call and return the text for the model."""
        found = self._tools.get(call.name)
        if found is None:
            known = ", ".join(self.names[:NAMES_SHOWN]) or "none"
            return error_text(f"there is no tool {call.name[:100]!r}; the tools are: {known}")
        try:
            arguments = read_arguments(call.arguments)
            # The text is made inside of the limit, because a value can be slow to encode.
            return await within(
                found.timeout_s, lambda: _call(found, arguments, context), name=found.name
            )
        except (ArgumentMismatch, ToolError) as error:
            return error_text(f"{found.name}: {error}")
        except CallTimeout as error:
            return error_text(str(error))
        except Exception as error:  # a tool raises whatever it likes
            fail_tool_running(error)
            return error_text(f"{found.name} raised {_describe(error)}")


async def _call(tool: OfferedTool, arguments: dict[str, object], context: object) -> str:
    value = await tool.call(arguments, context)
    try:
        return result_text(value, most=tool.max_characters)
    except Exception as error:  # methods of the value raise whatever they like
        kind = type(value).__name__
        return error_text(
            f"the result of {tool.name} is {kind}, which is not JSON: {_describe(error)}"
        )


class CallTimeout(TimeoutError):
    """A call of a tool did not return in time."""


async def within(seconds: float, call: Callable[[], object], *, name: str) -> str:
    """Return what the call returns. A call that takes longer is cancelled, and left behind if it does
    not end. Raises CallTimeout, and what the call raises as an Exception."""
    task = asyncio.ensure_future(_contain(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=ABANDON_S)
            raise CallTimeout(f"{name} did not return within {seconds:g} s")
        return task.result()
    finally:
        task.cancel()
        task.add_done_callback(_retrieve)


async def _contain(call: Callable[[], object]) -> str:
    """Await a call. Turn an error that is not an Exception into one, as it would end the event loop."""
    try:
        answer: str = await call()  # type: ignore[misc]  # it is a coroutine function
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a tool, too
        task = asyncio.current_task()
        is_cancelled = task is not None and task.cancelling() > 0
        if isinstance(error, Exception) or (
            isinstance(error, asyncio.CancelledError) and is_cancelled
        ):
            raise
        raise RuntimeError(_describe(error)) from error
    return answer


def _retrieve(task: "asyncio.Task[str]") -> None:
    """Look at the error of a call that nobody waits for, so that it is not logged."""
    if not task.cancelled():
        task.exception()


def read_arguments(arguments: object) -> dict[str, object]:
    """Return the arguments of a call, which the model wrote as JSON. Raises ArgumentMismatch when they
    are not a JSON object."""
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise ArgumentMismatch("the arguments are missing; write a JSON object")
    if len(arguments) > LONGEST_ARGUMENTS:
        raise ArgumentMismatch(
            f"the arguments have {len(arguments)} characters, more than {LONGEST_ARGUMENTS}"
        )
    try:
        found = json.loads(arguments or "{}", parse_constant=_refuse_constant)
    except RecursionError:
        raise ArgumentMismatch("the arguments are nested too deeply") from None
    except ValueError as error:
        raise ArgumentMismatch(f"the arguments are not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArgumentMismatch("the arguments are not a JSON object, such as {...}")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def requested_calls(reply: Mapping[str, object]) -> list[RequestedCall]:
    """Return the calls of a reply. A call without an id gets one."""
    calls = reply.get("tool_calls")
    found = []
    for number, call in enumerate(calls if isinstance(calls, list) else ()):
        outer = call if isinstance(call, dict) else {}
        inner = outer.get("function")
        inner = inner if isinstance(inner, dict) else {}
        name = str(inner.get("name") or "")
        found.append(
            RequestedCall(str(outer.get("id") or f"call_{number}"), name, inner.get("arguments"))
        )
    return found


def offered_tools(tools: object) -> list[OfferedTool]:
    """Return the tools of a list that an author wrote: functions, or tools. Raises UnusableTools."""
    if not isinstance(tools, list | tuple):
        raise UnusableTools(f"tools must be a list of functions, got {type(tools).__name__}")
    found: list[OfferedTool] = []
    for one in tools:
        if marked := marked_tool(one):
            found.append(marked)
        elif hasattr(one, "call") and hasattr(one, "parameters") and hasattr(one, "name"):
            found.append(one)
        elif callable(one):
            try:
                found.append(function_tool(one))
            except TypeError as error:
                raise UnusableTools(str(error)) from error
        else:
            raise UnusableTools(f"tools has {str(one)[:80]!r}; give functions marked by @tool")
    return found


def _spec(one: OfferedTool) -> dict[str, object]:
    """The tool in the form of OpenAI's chat completions."""
    function = {
        "name": one.name,
        "description": one.description,
        "parameters": one.parameters,
    }
    return {"type": "function", "function": function}


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # the `__str__` of user code raises whatever it likes
        text = "an error whose text cannot be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
