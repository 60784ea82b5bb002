"""Conversations -> token ids, and which of them the policy is to learn.

A conversation gets the ids that it would have, had its answers been sampled: a context is rendered and
encoded up to where the assistant begins, an answer up to and with the token that ends its turn, and what
the template puts between them by itself. So the span of an answer is exact to the token whether or not
the template marks what was generated, and supervised and reinforcement learning see the same ids. Where
the template rewrites what came before (some drop earlier reasoning), the answer stands in a row of its
own, below what the template made of the rest. Each answer is learned once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.config import LossTurns
from schemas.sampling import Message
from trainer.chat import Chat

Bit = Literal[0, 1]


@dataclass(slots=True)
class Row:
    """Ids, and a 1 for each that is to be learned."""

    ids: list[int] = field(default_factory=list)
    learned: list[Bit] = field(default_factory=list)

    def add(self, ids: Sequence[int], learned: Bit) -> None:
        self.ids += ids
        self.learned += [learned] * len(ids)


def rows_of(chat: Chat, messages: Sequence[Message], *, learned: LossTurns) -> list[Row]:
    """The training rows of a conversation. `learned`: the answers of the `assistant`, the `last` answer
    only, or `all` that the template writes. Raises UserCodeError when the template refuses it."""
    if learned == "all":
        row = Row()
        row.add(chat.closed(chat.text(messages, reply_next=False)).ids, 1)
        return [row]
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    rows: list[Row] = []
    written: str | None = None
    for i in answers[-1:] if learned == "last" else answers:
        context = chat.text(messages[:i], reply_next=True)
        if written is not None and context.startswith(written):
            rows[-1].add(chat.encode(context[len(written) :]), 0)
        else:
            rows.append(Row())
            rows[-1].add(chat.encode(context), 0)
        whole = chat.text(messages[: i + 1], reply_next=False)
        goes_on = whole.startswith(context)
        answer = chat.closed(whole[len(context) :] if goes_on else messages[i].content)
        rows[-1].add(answer.ids, 1)
        written = context + answer.text if goes_on else None
    return rows
