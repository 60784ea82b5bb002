"""The `messages` column of a dataset: whole conversations, as chat datasets usually have them.

With a label column, the conversation is the prompt. It ends with a message of the user or a tool.
Without a label column, the conversation is a demonstration. It ends with the assistant's answer, which
is to be learned. That answer becomes the row's label, and all messages before it, including earlier
answers, become its prompt.
"""

import json
from collections.abc import Sequence

from pydantic import ValidationError

from schemas.sampling import Message

ROLES = ("system", "user", "assistant", "tool")


class BadMessages(ValueError):
    """A conversation is wrong. The text says what is wrong, and with which message of the row."""


def parse_conversation(value: object, *, labelled: bool) -> tuple[tuple[Message, ...], str | None]:
    """The prompt and the label in a cell of the column. `labelled` means that another column holds the
    label; the label is None then. Raises BadMessages."""
    listed = _parse_list(value)
    messages = tuple(_parse_message(i, one) for i, one in enumerate(listed))
    if not messages:
        raise BadMessages("is an empty list; give at least one message")
    last = messages[-1]
    if labelled:
        if last.role not in ("user", "tool"):
            raise BadMessages(
                f"ends with the {last.role}; with a label column it is a prompt and must end with "
                "the user"
            )
        return messages, None
    if last.role != "assistant":
        raise BadMessages(
            f"ends with the {last.role}; a demonstration ends with the assistant's answer (or "
            "give the answer in a column ground_truth)"
        )
    if len(messages) == 1:
        raise BadMessages("has only the answer; put the question before it")
    if not last.content:
        raise BadMessages("ends with an empty answer; give the answer's text")
    return messages[:-1], last.content


def _parse_list(value: object) -> Sequence[object]:
    """A list, or its JSON text (as in CSV)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadMessages("is not a list of messages in JSON") from error
    if not isinstance(value, list):
        raise BadMessages("must be a list of {role, content}")
    return value


def _parse_message(index: int, value: object) -> Message:
    if not isinstance(value, dict):
        raise BadMessages(f"[{index}] must be an object with role and content")
    if unknown := sorted(set(value) - {"role", "content"}):
        raise BadMessages(
            f"[{index}] has {', '.join(map(repr, unknown))}; only role and content are read, so "
            "write tool calls into the content, as the model would say them"
        )
    try:
        return Message.model_validate(value, strict=True)
    except ValidationError as error:
        raise BadMessages(
            f"[{index}] needs a role of {', '.join(ROLES)} and content that is a string"
        ) from error
