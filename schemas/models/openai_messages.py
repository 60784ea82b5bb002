"""Chat messages as OpenAI's chat completions write them."""

from schemas.sampling import Message, ToolCall


def openai_message(message: Message) -> dict[str, object]:
    """Return a message as OpenAI's chat completions write it. Fields that are not set are left out."""
    written: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [openai_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    return written


def openai_tool_call(call: ToolCall) -> dict[str, object]:
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
