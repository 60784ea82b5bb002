"""The `openai` package: chat completions, with and without streaming."""

import json

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


async def run(base_url: str, api_key: str, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(4):
            if turn % 2:
                async with client.chat.completions.stream(
                    model="policy", messages=messages, tools=[TOOL]
                ) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, tools=[TOOL]
                )
                message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": added(call)})
    return message.content or ""


def added(call: object) -> str:
    """The result of a call, which may have any arguments."""
    try:
        given = json.loads(call.function.arguments)
        return str(given["a"] + given["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
