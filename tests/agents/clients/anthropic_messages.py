"""The `anthropic` package: messages, with and without streaming, and the counting of tokens."""

import anthropic

TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


async def run(base_url: str, api_key: str, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        asked = {"model": "policy", "messages": messages, "tools": [TOOL]}
        assert (await client.messages.count_tokens(**asked)).input_tokens > 0
        for turn in range(4):
            if turn % 2:
                async with client.messages.stream(**asked, max_tokens=64) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**asked, max_tokens=64)
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": added(call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    return "".join(block.text for block in answer.content if block.type == "text")


def added(given: dict[str, object]) -> str:
    """The result of a call, which may have any arguments."""
    try:
        return str(given["a"] + given["b"])
    except (KeyError, TypeError) as error:
        return f"error: {error}"
