"""Supervised fine-tuning: maximise the likelihood of the demonstrated answers.

    loss = - (1 / M) sum_t log pi_theta(t)        over the M answer tokens of the whole step

The mean is over all answer tokens of the optimizer step, not per micro-batch or per row. The prompt
is context. What closes the assistant's turn in the chat template (the end token) belongs to the
answer, since the policy must learn to stop; whatever the template adds after that does not. A
conversation longer than the run's max_sequence_length is cut at its end.
"""

from collections.abc import Sequence
from typing import Literal

from schemas.errors import Refused
from schemas.learning import Conversation
from schemas.sampling import Message
from schemas.sampling import Sequence as TokenSequence
from trainer.batch import Example, pack
from trainer.chat import Chat
from trainer.metrics import Means
from trainer.policy import Policy


def example_of(chat: Chat, conversation: Conversation, sample: int, *, max_tokens: int) -> Example:
    """A conversation as a training row. Raises Refused unless its last turn is the assistant's."""
    messages = tuple(
        Message.model_validate({"role": role, "content": text})
        for role, text in conversation.messages
    )
    if not messages or messages[-1].role != "assistant":
        raise Refused(f"row {conversation.row}: the last message must be the assistant's answer")
    prompt, answer = chat.demonstration(messages)
    tokens = (*prompt, *answer)[:max_tokens]
    mask: list[Literal[0, 1]] = [0] * len(prompt)
    mask.extend([1] * len(answer))
    row = TokenSequence(
        tokens=tokens, loss_mask=tuple(mask[:max_tokens]), logprobs=(0.0,) * len(tokens)
    )
    return Example(sample, row)


def step(
    policy: Policy,
    chat: Chat,
    conversations: Sequence[Conversation],
    *,
    max_sequence_length: int,
    micro_batch_tokens: int,
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Add the gradient of the loss of one batch to the policy's tensors; the optimizer is the
    learner's. Returns metrics and the micro-batch plan."""
    examples = [
        example_of(chat, conversation, i, max_tokens=max_sequence_length)
        for i, conversation in enumerate(conversations)
    ]
    num_actions = max(1, sum(example.num_actions for example in examples))
    means, plan = Means(), []
    for micro in pack(
        examples,
        micro_batch_tokens=micro_batch_tokens,
        share=policy.shares_prompts,
        device=policy.device,
    ):
        logprobs_M, entropy_M = policy.logprobs(micro, temperature=1.0)
        loss = -logprobs_M.sum() / num_actions
        loss.backward()
        means.add_sum("train/loss", loss)
        means.add("train/entropy_loss", entropy_M)
        plan.append(micro.num_tokens)
    return means.values(), tuple(plan)
