"""Reward models that score the samples of a run: what names one, and the port that asks it."""

from collections.abc import Sequence
from typing import Protocol

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.sampling import Day, LoraScaling, Message, ModelRef, ToolSpec, Value


class RewardModelSpec(Value):
    """A checkpoint of a reward model: the adapter with its head (`weights`) on a base model (`base`).
    The reward of a sample gets `weight` times its score. `date` is the current date as the chat template
    saw it in training."""

    name: str
    weight: float = 1.0
    checkpoint: str
    base: ModelRef
    weights: ArtifactRef
    lora_alpha: float
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=lambda value: value is None)
    date: Day | None = None


class Scorer(Protocol):
    """Asks reward models. A score depends on its model and conversation alone."""

    async def score(
        self, model: RewardModelSpec, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> float:
        """Return the score of a conversation that ends with the assistant's answer. Raises UserCodeError
        when the model cannot read it, and Refused when the model cannot be loaded."""
        ...
