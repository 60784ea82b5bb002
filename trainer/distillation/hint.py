"""The rows that the teacher reads: those of the student, or with a hint the same answers after another
prompt.

A hint is put behind the last message of the user in the prompt, after a blank line. The student never
reads it, so it learns to answer without it what the teacher answers with it. The prompt is rendered
again, and the sampled tokens stay as they are. A prompt may have answers that the policy did not write,
such as examples. A row whose prompt does not have the tokens that the student was asked with is refused.
"""

from collections.abc import Sequence
from typing import Literal

from schemas.errors import Refused
from schemas.learner import GradedGroup
from schemas.sampling import (
    DrawKey,
    Message,
    ModelRef,
    PolicyRef,
    SampleRecord,
    SampleRequest,
    SamplingParams,
    ToolSpec,
)
from schemas.sampling import Sequence as TokenSequence
from trainer.model.chat_template import Chat

CONTEXT: Literal[0] = 0
"""A token that the policy did not choose, in a loss mask."""


def hinted_row(
    number: int, sample: SampleRecord, group: GradedGroup, *, chat: Chat
) -> TokenSequence:
    """A row of a sample, by its number, as the teacher reads it. Without a hint it is the row itself.
    Raises Refused when the hint cannot be placed."""
    row = sample.sequences[number]
    if group.hint is None:
        return row
    tools = sample.row_tools[number] if sample.row_tools else sample.tools
    for messages in sample.conversations:
        prompt, size = _find_prompt(row, messages, tools, chat=chat)
        if size:
            break
    else:
        raise Refused(
            f"advanced.teacher_hint cannot be placed in sample {sample.index} of slot {group.slot}: the "
            "conversation that its workflow returned does not begin with the prompt that the policy was "
            "asked with. Return the whole conversation, without changing it, or remove the hint"
        )
    hinted = _prompt_ids(_with_hint(prompt, group.hint, sample, group), tools, chat=chat)
    return TokenSequence(
        tokens=(*hinted, *row.tokens[size:]),
        loss_mask=(*(CONTEXT for _ in hinted), *row.loss_mask[size:]),
        logprobs=((0.0,) * len(hinted) + row.logprobs[size:]),
    )


def _find_prompt(
    row: TokenSequence, messages: Sequence[Message], tools: tuple[ToolSpec, ...], *, chat: Chat
) -> tuple[tuple[Message, ...], int]:
    """The messages that the policy was asked with before its first answer in the row, and the number of
    their tokens, 0 if the row does not begin with a part of the conversation."""
    asked: tuple[Message, ...] = ()
    size, first_action = 0, row.loss_mask.index(1)
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = tuple(messages[:place])
        ids = _prompt_ids(before, tools, chat=chat)
        if len(ids) > first_action:
            break
        if ids and row.tokens[: len(ids)] == ids:
            asked, size = before, len(ids)
    return asked, size


def _with_hint(
    prompt: Sequence[Message], hint: str, sample: SampleRecord, group: GradedGroup
) -> tuple[Message, ...]:
    places = [place for place, message in enumerate(prompt) if message.role == "user"]
    if not places:
        raise Refused(
            f"advanced.teacher_hint is put behind a message of the user, and the prompt of sample "
            f"{sample.index} of slot {group.slot} has none; add one, or remove the hint"
        )
    last = places[-1]
    told = prompt[last].model_copy(update={"content": f"{prompt[last].content}\n\n{hint}"})
    return (*prompt[:last], told, *prompt[last + 1 :])


def _prompt_ids(
    messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], *, chat: Chat
) -> tuple[int, ...]:
    """The ids of a prompt, as the sampler computes them."""
    request = SampleRequest(
        model=ModelRef(kind="scratch", name=""),
        policy=PolicyRef(version=0),
        params=SamplingParams(),
        key=DrawKey(purpose="train", step=0, slot=0, replacement=0, sample=0),
        messages=messages,
        tools=tools,
    )
    return tuple(chat.prompt_ids(request)) if messages else ()
