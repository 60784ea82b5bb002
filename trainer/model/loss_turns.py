"""Conversations -> token ids, and which of them the policy is to learn.

A conversation gets the ids that it would have, had its answers been sampled: a context is rendered up to
where the assistant begins, an answer up to and with the token that ends its turn, and the ids of each
are those that it has in the whole (`trainer/model/text_parts.py`). So the span of an answer is exact to
the token whether or not the template marks what was generated, and supervised and reinforcement learning
see the same ids. Where the template rewrites what came before (some drop earlier reasoning), the answer
stands in a row of its own, below what the template made of the rest. Each answer is learned once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.config import LossTurns
from schemas.sampling import Message
from trainer.model.chat_template import Chat

Bit = Literal[0, 1]


@dataclass(slots=True)
class TrainingRow:
    """Ids, and a 1 for each that is to be learned."""

    ids: list[int] = field(default_factory=list)
    learned: list[Bit] = field(default_factory=list)

    def add(self, ids: Sequence[int], learned: Bit) -> None:
        self.ids += ids
        self.learned += [learned] * len(ids)


def training_rows(
    chat: Chat, messages: Sequence[Message], *, learned: LossTurns
) -> list[TrainingRow]:
    """The training rows of a conversation. `learned`: the answers of the `assistant`, the `last` answer
    only, or `all` that the template writes. Raises UserCodeError when the template refuses it."""
    if learned == "all":
        return [_row(chat, [(chat.cut_after_last_turn(chat.text(messages, reply_next=False)), 1)])]
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    rows: list[list[tuple[str, Bit]]] = []
    written: str | None = None
    for i in answers[-1:] if learned == "last" else answers:
        context = chat.text(messages[:i], reply_next=True)
        if written is not None and context.startswith(written):
            rows[-1].append((context[len(written) :], 0))
        else:
            rows.append([(context, 0)])
        whole = chat.text(messages[: i + 1], reply_next=False)
        goes_on = whole.startswith(context)
        answer = chat.cut_after_last_turn(whole[len(context) :] if goes_on else messages[i].content)
        rows[-1].append((answer, 1))
        written = context + answer if goes_on else None
    return [_row(chat, parts) for parts in rows]


def _row(chat: Chat, parts: Sequence[tuple[str, Bit]]) -> TrainingRow:
    """Encoded as a whole: no answer begins otherwise than behind its context."""
    row = TrainingRow()
    found = chat.encode_parts([text for text, _ in parts])
    for (_, learned), ids in zip(parts, found, strict=True):
        row.add(chat.with_end_token(ids) if learned else ids, learned)
    return row
