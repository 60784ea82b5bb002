"""The `openai` package: the Responses API, by items and by the id of the response before."""

import json

import openai

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "strict": False,
}


async def run(base_url: str, api_key: str, prompt: str) -> str:
    history = [{"role": "user", "content": prompt}]
    new, before = history, None
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(4):
            options = {"previous_response_id": before} if turn % 2 else {}
            async with client.responses.stream(
                model="policy", input=new if turn % 2 else history, tools=[TOOL], **options
            ) as stream:
                answer = await stream.get_final_response()
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                break
            new = [
                {"type": "function_call_output", "call_id": call.call_id, "output": added(call)}
                for call in calls
            ]
            history += [item.model_dump(exclude_none=True) for item in answer.output] + new
            before = answer.id
    return answer.output_text


def added(call: object) -> str:
    """The result of a call, which may have any arguments."""
    try:
        given = json.loads(call.arguments)
        return str(given["a"] + given["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
