"""Supervised fine-tuning: maximise the likelihood of the demonstrated answers.

    loss = - (1 / M) sum_t log pi_theta(t)        over the M learned tokens of the whole step

This file is one training step, from conversations to updated weights. Read it from `step`, which the
learner calls.

The mean is over all learned tokens of the optimizer step, and not per micro-batch or per row. The policy
learns the answers of the assistant. Each includes the token that ends its turn, so that the policy
learns to stop. With `advanced.loss_turns` it learns only the last answer, or all tokens. All other
tokens are context. `trainer/model/loss_turns.py` says which token ids a conversation has.

Conversations are packed into micro-batches, but no conversation attends to another
(`trainer/forward/packing.py`). So the loss is the same as if each were computed by itself. A row that is
longer than the run's max_sequence_length is cut at its end, and counted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from schemas.config import Advanced, LossTurns
from schemas.errors import Refused
from schemas.learner import RULES, Conversation
from schemas.sampling import Message
from schemas.sampling import Sequence as TokenSequence
from trainer.forward.packing import Example, MicroBatch, pack
from trainer.model.chat_template import Chat
from trainer.model.loss_turns import TrainingRow, training_rows
from trainer.objective.metrics import Means
from trainer.optimizer import Optimizers, StepSize
from trainer.policy import Policy


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """The training rows of a batch. `num_cut` is the number of conversations that are longer than the
    limit. `num_lost` is the number of conversations without a learned token within the limit."""

    examples: tuple[Example, ...]
    num_conversations: int
    num_cut: int
    num_lost: int

    @property
    def num_actions(self) -> int:
        """The number of learned tokens."""
        return sum(example.num_actions for example in self.examples)

    def metrics(self) -> dict[str, float]:
        """The metrics of the batch, by key: how many tokens are learned, and which share of the
        conversations was cut."""
        return {
            "train/learned_tokens": float(self.num_actions),
            "train/truncated_ratio": self.num_cut / max(1, self.num_conversations),
            "train/unlearned_ratio": self.num_lost / max(1, self.num_conversations),
        }


def step(
    policy: Policy,
    optimizers: Optimizers,
    conversations: Sequence[Conversation],
    *,
    chat: Chat,
    advanced: Advanced,
    micro_batch_tokens: int,
    step_size: StepSize,
    rules: int = RULES,
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Train the policy on one batch of conversations, in place. Returns the metrics of the step by key,
    and its micro-batch plan: the number of tokens of each micro-batch, in order. Raises Refused if a
    conversation does not end with an assistant message."""
    # 1. Encode the conversations, and mark the tokens that are learned.
    batch = demonstrations_of(conversations, chat, advanced)

    # 2. Forward and backward, one micro-batch after the other.
    metrics, plan = accumulate_gradients(
        policy, batch, micro_batch_tokens=micro_batch_tokens, rules=rules
    )

    # 3. Clip the gradients and take an optimizer step at the learning rate of this training step.
    metrics |= optimizers.update(step_size, loss=metrics.get("train/loss", 0.0))

    # 4. Report what was learned, and what was cut.
    return metrics | batch.metrics(), plan


def accumulate_gradients(
    policy: Policy, batch: Demonstrations, *, micro_batch_tokens: int, rules: int = RULES
) -> tuple[dict[str, float], tuple[int, ...]]:
    """Add the gradient of the batch's loss to the trained tensors. Returns the metrics by key, and the
    micro-batch plan (tokens per micro-batch). The loss is divided by the number of learned tokens of the
    whole step."""
    num_actions = max(1, batch.num_actions)
    means, plan = Means(), []
    for micro in _micro_batches(policy, batch, micro_batch_tokens, rules=rules):
        logprobs_M, entropy_M = policy.logprobs(micro, temperature=1.0)
        loss = -logprobs_M.sum() / num_actions
        loss.backward()
        means.add_sum("train/loss", loss)
        means.add("train/entropy_loss", entropy_M)
        plan.append(micro.num_tokens)
    return means.values(), tuple(plan)


@torch.no_grad()
def evaluate(
    policy: Policy,
    conversations: Sequence[Conversation],
    *,
    chat: Chat,
    advanced: Advanced,
    micro_batch_tokens: int,
    rules: int = RULES,
) -> dict[str, float]:
    """The loss of held-out conversations, by metric key. Computes no gradient and changes nothing.
    Raises Refused if a conversation does not end with an assistant message."""
    batch = demonstrations_of(conversations, chat, advanced)
    if not batch.num_actions:
        return {}
    sums = [
        float(policy.logprobs(micro, temperature=1.0)[0].double().sum())
        for micro in _micro_batches(policy, batch, micro_batch_tokens, rules=rules)
    ]
    return {"eval/validation/loss": -math.fsum(sums) / batch.num_actions}


def demonstrations_of(
    conversations: Sequence[Conversation], chat: Chat, advanced: Advanced
) -> Demonstrations:
    """Conversations as training rows, with the run's length limit and choice of turns. Raises Refused if
    one does not end with an assistant message."""
    return demonstrations(
        chat,
        conversations,
        max_tokens=advanced.max_sequence_length,
        learned=advanced.loss_turns or "assistant",
    )


def demonstrations(
    chat: Chat, conversations: Sequence[Conversation], *, max_tokens: int, learned: LossTurns
) -> Demonstrations:
    """Conversations as training rows of at most `max_tokens` tokens. `learned` says which turns are
    learned. Raises Refused if a conversation does not end with an assistant message."""
    examples: list[Example] = []
    cut = lost = 0
    for i, conversation in enumerate(conversations):
        rows = training_rows(
            chat, _messages(conversation), tools=conversation.tools, learned=learned
        )
        packed = [example_of(row, i, max_tokens=max_tokens) for row in rows]
        examples += packed
        cut += any(len(row.ids) > max_tokens for row in rows)
        lost += not any(example.num_actions for example in packed)
    return Demonstrations(tuple(examples), len(conversations), cut, lost)


def _messages(conversation: Conversation) -> tuple[Message, ...]:
    messages = tuple(
        one
        if isinstance(one, Message)
        else Message.model_validate({"role": one[0], "content": one[1]})
        for one in conversation.messages
    )
    if not messages or messages[-1].role != "assistant":
        raise Refused(f"row {conversation.row}: the last message must be the assistant's answer")
    return messages


def example_of(row: TrainingRow, sample: int, *, max_tokens: int) -> Example:
    """A row in the form in which it is packed, cut at its end to `max_tokens`."""
    tokens = tuple(row.ids[:max_tokens])
    learned = tuple(row.learned[:max_tokens])
    return Example(
        sample, TokenSequence(tokens=tokens, loss_mask=learned, logprobs=(0.0,) * len(tokens))
    )


def _micro_batches(
    policy: Policy, batch: Demonstrations, micro_batch_tokens: int, *, rules: int
) -> Iterator[MicroBatch]:
    return pack(
        batch.examples,
        micro_batch_tokens=micro_batch_tokens,
        share=policy.shares_prompts,
        prefixes=policy.shares_prefixes,
        splits=rules >= 2,
        device=policy.device,
    )
