"""Turns conversations into token ids, and marks which of them the policy learns.

A conversation gets the ids that it would have if its answers had been sampled. A context is rendered up
to where the assistant begins, and an answer up to and including the token that ends its turn. The ids of
each are those that it has in the whole text (`trainer/model/text_parts.py`). So the span of an answer is
exact to the token, whether or not the template marks generated text, and supervised and reinforcement
learning see the same ids. Where the template rewrites earlier turns (some drop earlier reasoning), the
answer gets a row of its own, after the template's new rendering of its context. Each answer is learned
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.config import LossTurns
from schemas.sampling import Message, ToolSpec
from trainer.model.chat_template import Chat

Bit = Literal[0, 1]


@dataclass(slots=True)
class TrainingRow:
    """One row of supervised training: its ids, and for each id a 1 if it is learned, else a 0."""

    ids: list[int] = field(default_factory=list)
    learned: list[Bit] = field(default_factory=list)

    def add(self, ids: Sequence[int], learned: Bit) -> None:
        self.ids += ids
        self.learned += [learned] * len(ids)


def training_rows(
    chat: Chat,
    messages: Sequence[Message],
    *,
    tools: Sequence[ToolSpec] = (),
    learned: LossTurns,
) -> list[TrainingRow]:
    """The training rows of a conversation that offers `tools`. `learned`: the answers of the
    `assistant`, the `last` answer only, or `all` text that the template writes. Raises UserCodeError
    when the template fails. Conversations with tools are written by the renderer of the model's family,
    if there is one, because many templates of families write calls in forms of their own."""
    has_tools = tools or any(message.tool_calls or message.role == "tool" for message in messages)
    if has_tools and chat.family_ids(messages, tools, reply_next=False) is not None:
        return _family_rows(chat, messages, tools, learned)
    if learned == "all":
        text = chat.text(messages, tools=tools, reply_next=False)
        return [_row(chat, [(chat.cut_after_last_turn(text), 1)])]
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    rows: list[list[tuple[str, Bit]]] = []
    written: str | None = None
    for i in answers[-1:] if learned == "last" else answers:
        context = chat.text(messages[:i], tools=tools, reply_next=True)
        if written is not None and context.startswith(written):
            rows[-1].append((context[len(written) :], 0))
        else:
            rows.append([(context, 0)])
        whole = chat.text(messages[: i + 1], tools=tools, reply_next=False)
        goes_on = whole.startswith(context)
        answer = chat.cut_after_last_turn(whole[len(context) :] if goes_on else messages[i].content)
        rows[-1].append((answer, 1))
        written = context + answer if goes_on else None
    return [_row(chat, parts) for parts in rows]


def _family_rows(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec], learned: LossTurns
) -> list[TrainingRow]:
    """The same rows, of the ids that the renderer of the model's family writes."""
    if learned == "all":
        row = TrainingRow()
        whole = chat.family_ids(messages, tools, reply_next=False) or []
        row.add(chat.with_end_token(chat.cut_ids_after_last_turn(whole)), 1)
        return [row]
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    rows: list[TrainingRow] = []
    for i in answers[-1:] if learned == "last" else answers:
        context = chat.family_ids(messages[:i], tools, reply_next=True) or []
        whole = chat.family_ids(messages[: i + 1], tools, reply_next=False) or []
        if (
            whole[: len(context)] != context
        ):  # it begins an answer in another way than it writes one
            context = context[: _num_shared(context, whole)]
        answer = chat.with_end_token(chat.cut_ids_after_last_turn(whole[len(context) :]))
        if not rows or context[: len(rows[-1].ids)] != rows[-1].ids:
            rows.append(TrainingRow())
        rows[-1].add(context[len(rows[-1].ids) :], 0)
        rows[-1].add(answer, 1)
    return rows


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids the two have in common at their beginning."""
    differing = (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _row(chat: Chat, parts: Sequence[tuple[str, Bit]]) -> TrainingRow:
    """The parts, encoded as one text, so that an answer has the ids that it has after its context."""
    row = TrainingRow()
    found = chat.encode_parts([text for text, _ in parts])
    for (_, learned), ids in zip(parts, found, strict=True):
        row.add(chat.with_end_token(ids) if learned else ids, learned)
    return row
