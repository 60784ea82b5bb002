"""The columns of preferences, in the forms that TRL reads.

*Paired*: `prompt`, `chosen` and `rejected`, and where it is known a number `margin`. *Binary*: `prompt`,
`completion` and `label`, which is true for a desirable completion. A prompt is text or a list of
messages, and so is an answer. An answer in messages may repeat the prompt before its last message; then
the column `prompt` may be left out. Text becomes a message of the user, or of the assistant, because a
policy is trained and sampled with its chat template. An answer that is text therefore needs its prompt
in a column: what two texts have in common at their beginning does not end where a message ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from producers.core.datasets.messages import BadMessages, parse_messages
from producers.core.datasets.readers import type_name
from producers.core.datasets.strict_json import loads
from schemas.datasets import LABELLED_COLUMNS, PreferenceForm
from schemas.sampling import Message

MOST_MARGIN = 1e6

TRUTHS = {"true": True, "false": False}
"""Labels as CSV has them, in lower case."""


class BadPreference(ValueError):
    """A row of preferences is wrong. `column` is the column with the mistake."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """One row: its prompt, and an answer of each kind that it has."""

    prompt: tuple[Message, ...]
    chosen: str | None = None
    rejected: str | None = None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """The text of an answer, and the messages before it. `before` is None where the cell is text."""

    text: str
    before: tuple[Message, ...] | None


def header_problem(columns: tuple[str, ...]) -> str | None:
    """The mistake in the columns of a file that has answers of pairs, or None."""
    names = set(columns)
    found = [name for name in ("chosen", "rejected") if name in names]
    if not found:
        return None
    allowed = {"messages"} if len(found) == 2 else set()
    mixed = sorted(names & (LABELLED_COLUMNS | {"completion"}) - allowed)
    if mixed:
        return (
            f"has {' and '.join(found)} beside {', '.join(mixed)}; keep the columns of one form: "
            "prompt, chosen and rejected for preferences, or user_prompt and ground_truth"
        )
    if len(found) == 1:
        missing = "rejected" if found == ["chosen"] else "chosen"
        return (
            f"has {found[0]} but no column {missing}; a preference needs both answers. Add the column, "
            f"or read another one as it with --map COLUMN={missing}. For answers that are judged alone, "
            "use the columns prompt, completion and label (true or false)"
        )
    return None


def parse_preference(
    values: Mapping[str, object], form: PreferenceForm, *, json_cells: bool
) -> AnsweredPrompt:
    """The row in these cells. With `json_cells` a list of messages may be JSON text, as in CSV. Raises
    BadPreference."""
    if json_cells:
        values = {name: _read_cell(value) for name, value in values.items()}
    if form == "binary":
        is_desirable = _parse_label(values["label"])
        prompt, (text,) = _parse_row(values, ("completion",))
        if is_desirable:
            return AnsweredPrompt(prompt, chosen=text)
        return AnsweredPrompt(prompt, rejected=text)
    prompt, (chosen, rejected) = _parse_row(values, ("chosen", "rejected"))
    if chosen == rejected:
        raise BadPreference(
            "rejected", "equals chosen, so nothing can be learned from the row; remove the row"
        )
    return AnsweredPrompt(prompt, chosen, rejected, _parse_margin(values.get("margin")))


def _parse_margin(value: object) -> float | None:
    """The margin in a cell, None where it is empty."""
    if value is None or value == "":
        return None
    margin = _number(value)
    if margin is None or not 0 <= margin <= MOST_MARGIN:
        raise BadPreference(
            "margin",
            f"must be a number from 0 to {MOST_MARGIN:,.0f}, by which the reward of chosen should be "
            f"above that of rejected, got {value!r:.40}; leave the cell empty where there is none",
        )
    return margin


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _parse_label(value: object) -> bool:
    if isinstance(value, str):
        value = TRUTHS.get(value.lower(), value)
    if not isinstance(value, bool):
        got = "null" if value is None else f"{value!r:.40}"
        raise BadPreference(
            "label",
            f"must be true or false beside a completion, got {got}; for a ground truth, use "
            "user_prompt and ground_truth",
        )
    return value


def _parse_row(
    values: Mapping[str, object], names: tuple[str, ...]
) -> tuple[tuple[Message, ...], list[str]]:
    """The prompt, and the texts of the answers in the columns `names`."""
    answers = [_parse_answer(name, values[name]) for name in names]
    first, last = answers[0], answers[-1]
    if (first.before is None) != (last.before is None):
        kinds = ("text", "messages") if first.before is None else ("messages", "text")
        raise BadPreference(
            names[-1], f"is {kinds[1]} but {names[0]} is {kinds[0]}; use one form for both"
        )
    if first.before != last.before:
        raise BadPreference(
            names[-1],
            f"differs from {names[0]} before its last message; both must answer the same prompt",
        )
    return _find_prompt(values.get("prompt"), first.before or ()), [one.text for one in answers]


def _find_prompt(given: object, before: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt: the cell `given`, and what the answers repeat of it (`before`), which must agree."""
    if given is None or given in ("", []):
        if not before:
            raise BadPreference(
                "prompt",
                "is missing; give the prompt, as text or as a list of messages, or read another column "
                "as it with --map COLUMN=prompt",
            )
        prompt = before
    elif isinstance(given, str):
        if not given.strip():
            raise BadPreference("prompt", "is empty; give the prompt's text")
        prompt = before or (Message(role="user", content=given),)
        if before and before[-1].content != given:
            raise BadPreference("prompt", "is not the last message before the answers; remove one")
    else:
        prompt = _messages("prompt", given)
        if before and before != prompt:
            raise BadPreference(
                "prompt", "differs from the messages before the answers; remove one"
            )
    if prompt[-1].role not in ("user", "tool"):
        raise BadPreference(
            "prompt", f"ends with the {prompt[-1].role}; end it with the user's message"
        )
    return prompt


def _parse_answer(column: str, value: object) -> _Answer:
    if isinstance(value, str):
        text, before = value, None
    else:
        messages = _messages(column, value)
        last, before = messages[-1], messages[:-1]
        if last.role != "assistant":
            raise BadPreference(
                column, f"ends with the {last.role}; end it with the assistant's answer"
            )
        if last.tool_calls:
            raise BadPreference(
                column, "ends with a call of a tool; end it with the answer that follows its result"
            )
        if last.reasoning:
            raise BadPreference(
                column,
                "has an answer with reasoning, which is not learned; write the reasoning into content "
                "as the model's template does, or leave it out",
            )
        text = last.content
    if not text.strip():
        raise BadPreference(
            column, "has an empty answer; give the answer's text, or remove the row"
        )
    return _Answer(text, before)


def _messages(column: str, value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadPreference(
            column,
            f"must be text or a list of {{role, content}}, got {type_name(value)}; correct it, or "
            "remove the row",
        )
    try:
        messages = parse_messages(value)
    except BadMessages as bad:
        raise BadPreference(column, str(bad)) from bad
    if not messages:
        raise BadPreference(column, "is an empty list; give at least one message")
    return messages


def _read_cell(cell: object) -> object:
    """The list of messages whose JSON the cell is, or the cell."""
    if not isinstance(cell, str) or not cell.lstrip().startswith("[{"):
        return cell
    try:
        found = loads(cell)
    except (ValueError, RecursionError):
        return cell
    one = found[0] if isinstance(found, list) and found else None
    return found if isinstance(one, dict) and {"role", "from"} & set(one) else cell
