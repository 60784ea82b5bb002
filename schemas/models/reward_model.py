"""Reward models that score the samples of a run: the table and the value that name one, and the port."""

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from schemas.artifact_refs import ArtifactRef
from schemas.sampling import Day, LoraScaling, Message, ModelRef, ToolSpec, Value

MOST_REWARD_MODELS = 4
"""The most reward models of a run."""


class RewardModelTable(BaseModel):
    """A reward model, whose score is added to the reward, and its weight."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    model: Annotated[str, StringConstraints(min_length=1, pattern=r"^\S+$")]
    """a checkpoint of a run with `algorithm = "reward_model"`: `RUN@STEP` or `RUN@last`"""
    weight: float = 1.0
    """the score is multiplied by this"""
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")] | None = None
    """the name of the score in metrics and samples; default: `reward_model_1` and so on"""


RewardModelTables = Annotated[
    tuple[RewardModelTable, ...],
    Field(max_length=MOST_REWARD_MODELS, exclude_if=lambda value: not value),
]


def score_names(tables: Sequence[RewardModelTable]) -> tuple[str, ...]:
    """Return the name of the score of each reward model."""
    return tuple(one.name or f"reward_model_{number}" for number, one in enumerate(tables, 1))


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
