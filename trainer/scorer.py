"""Asks reward models for the scores of conversations (`schemas.models.reward_model.Scorer`).

A conversation is written with the reward model's own chat template and tokens, as in training
(`trainer/preferences/batch.py`): it ends with the token that ends the answer's turn, also where a sample
was cut off at a limit. Each conversation is a pass of its own. A pass of several would give other bits
in another company, and a reward must not depend on what else a worker does.
"""

from collections.abc import Sequence

import torch

from schemas.errors import FailureCategory, Refused, UserCodeError
from schemas.learner import Conversation
from schemas.models.reward_model import RewardModelSpec
from schemas.sampling import Message, PolicyRef, ToolSpec
from trainer.algorithms.sft import demonstrations
from trainer.forward.ops import Forward
from trainer.forward.packing import pack
from trainer.model.chat_template import Chat
from trainer.model.lora_names import Scaling, Tensors
from trainer.model.scalar_heads import SCORE_NAME
from trainer.policy import LoadedModel, Policy
from trainer.weight_cache import WeightCache

FORWARD = Forward(allows_native=False)
"""One way to compute a pass, on each machine."""


class TorchScorer:
    """The scorer of this device. It computes on the device's thread."""

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache

    async def score(
        self, model: RewardModelSpec, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> float:
        """The score of a conversation. Raises UserCodeError when it has no answer or is longer than the
        model's context, and Refused when the checkpoint has no head or its base cannot be loaded."""
        loaded = await self._cache.load_model(model.base)
        trained = await self._cache.load_tensors(PolicyRef(version=0, weights=model.weights))
        if SCORE_NAME not in trained:
            raise Refused(
                f"{model.checkpoint} has no head that scores; name a checkpoint of reward_model in "
                "advanced.reward_models"
            )
        work = (loaded, trained, model, tuple(messages), tuple(tools))
        return await self._cache.device.run(_score, *work)


@torch.no_grad()
def _score(
    loaded: LoadedModel,
    trained: Tensors,
    model: RewardModelSpec,
    messages: tuple[Message, ...],
    tools: tuple[ToolSpec, ...],
) -> float:
    base = loaded.base
    chat = Chat(base.tokenizer, base.stop_ids, date=model.date)
    talk = Conversation(0, cut_after_last_answer(messages), tools=tools)
    found = demonstrations(chat, [talk], max_tokens=base.context, learned="last")
    if found.num_cut:
        raise UserCodeError(
            FailureCategory.GRADER,
            f"the conversation is longer than the {base.context} tokens that the reward model "
            f"{model.checkpoint} reads; lower training.max_response_length, or use another reward model",
        )
    scaling = Scaling(model.lora_alpha, model.lora_scaling)
    policy = Policy(loaded, dict(trained), scaling, forward=FORWARD)
    (micro,) = pack(
        found.examples,
        micro_batch_tokens=base.context,
        share=policy.shares_prompts,
        device=policy.device,
    )
    return float(policy.scores(micro)[0])


def cut_after_last_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation up to its last answer. Raises UserCodeError when it has none."""
    places = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not places:
        raise UserCodeError(
            FailureCategory.GRADER,
            "the sample has no answer of the assistant that a reward model can score; let the workflow "
            "return the conversation with its answers",
        )
    return messages[: places[-1] + 1]
