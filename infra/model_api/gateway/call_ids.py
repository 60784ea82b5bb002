"""The ids of tool calls. A model may write none, or the same one twice."""

from schemas.sampling import Turn


def with_unique_ids(turn: Turn, number: int, *, used: set[str]) -> Turn:
    """Return the turn of the request `number`, with new ids for those of its tool calls that are empty
    or in `used`. All its ids are added to `used`."""
    if turn.answer is None or not turn.answer.tool_calls:
        return turn
    calls = []
    for place, call in enumerate(turn.answer.tool_calls):
        new = call.id if call.id and call.id not in used else f"call_{number}_{place}"
        used.add(new)
        calls.append(call.model_copy(update={"id": new}))
    answer = turn.answer.model_copy(update={"tool_calls": tuple(calls)})
    return turn.model_copy(update={"answer": answer})
