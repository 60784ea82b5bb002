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
    when the template fails."""
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


def _row(chat: Chat, parts: Sequence[tuple[str, Bit]]) -> TrainingRow:
    """The parts, encoded as one text, so that an answer has the ids that it has after its context."""
    row = TrainingRow()
    found = chat.encode_parts([text for text, _ in parts])
    for (_, learned), ids in zip(parts, found, strict=True):
        row.add(chat.with_end_token(ids) if learned else ids, learned)
    return row
