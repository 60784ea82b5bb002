"""The package `litellm`, over chat completions."""

import json

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


async def run(base_url: str, api_key: str, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    for _ in range(4):
        answer = await litellm.acompletion(
            model="openai/policy",
            base_url=base_url,
            api_key=api_key,
            messages=messages,
            tools=[TOOL],
            tool_choice="auto",
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            try:
                given = json.loads(call.function.arguments)
                result = str(given["a"] + given["b"])
            except (ValueError, KeyError, TypeError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return message.content or ""
