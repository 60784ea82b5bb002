"""Let the model use the calculator of the MCP server, and reward a right answer.

The model's chat template knows no tools. So the workflow shows one exchange as an example, reads a call
from the text of an answer, and sends the result as the next message.
"""

import json
import re

from headrace import AgentWorkflow, reward

CALL = re.compile(r"calc\((-?\d{1,9}) ?([+-]) ?(-?\d{1,9})\)")
NUMBER = re.compile(r"-?\d+")

EXAMPLE = [
    {
        "role": "user",
        "content": "State the final answer to the following arithmetic problem: 12 + 30 =",
    },
    {"role": "assistant", "content": "calc(12 + 30)"},
    {"role": "user", "content": "42"},
    {"role": "assistant", "content": "42"},
]


def call_of(text: str) -> dict[str, object] | None:
    """The call that an answer consists of, in OpenAI's form."""
    if (found := CALL.fullmatch(text.strip())) is None:
        return None
    left, operator, right = found.groups()
    arguments = {"left": int(left), "operator": operator, "right": int(right)}
    function = {"name": "calc", "arguments": json.dumps(arguments)}
    return {"id": "call", "type": "function", "function": function}


class Calculate(AgentWorkflow):
    mcp = ["main"]

    async def run(self, ctx):
        messages = [*EXAMPLE, *ctx.prompt]
        reply = await ctx.chat(messages)
        messages.append(reply)
        if (call := call_of(reply["content"])) is not None:
            [result] = await ctx.call_tools({**reply, "tool_calls": [call]})
            messages.append({"role": "user", "content": result["content"]})
            messages.append(await ctx.chat(messages))
        return messages


@reward
def right_answer(solution_str, ground_truth, extra_info=None, **kwargs):
    """Return 1.0 if the last number of the last answer is the true one. A call that is never followed
    by an answer is worth nothing."""
    return float(NUMBER.findall(solution_str)[-1:] == [ground_truth])
