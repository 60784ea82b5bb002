"""Effects are what a decider may request. Outcomes are what comes back.

An effect is a row that a worker claims and performs. It never travels on the bus. Its id is derived
from what it does (`key`), so that requesting it twice is the same as requesting it once. An outcome
exists only between `perform` and `handle`. Whatever must last becomes an event.
"""

from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from schemas.errors import FailureCategory, Issue
from schemas.ids import HEADRACE, EffectId, derive_id


class Lane(StrEnum):
    """A kind of work. A worker serves the lanes for which it has what is needed. Only the control
    process serves `submit`."""

    CONTROL = "control"
    SUBMIT = "submit"
    USER = "user"
    GENERATE = "generate"
    TRAIN = "train"
    SERVE = "serve"
    EXPORT = "export"


class Effect(BaseModel):
    """Root of all effects. `lane` says which workers can perform it, and `run_id` names the run whose
    gate applies to it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: ClassVar[str]
    lane: ClassVar[Lane]

    @property
    def key(self) -> str:
        """A unique name of the work, by default its `run_id`. The id is derived from it."""
        return self.run_id

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The run, evaluation or workspace for which it works."""

    @property
    def size(self) -> int:
        """How much work it is, in places of its lane: a worker holds as many places as it computes at
        once."""
        return 1

    @property
    def id(self) -> EffectId:
        return EffectId(derive_id(HEADRACE, f"{self.type}/{self.key}"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Root of all outcomes."""


@dataclass(frozen=True, slots=True)
class Failed(Outcome):
    """The effect ended without a result. This is a fact about the work, and not a crash of Headrace."""

    effect: Effect
    category: FailureCategory
    message: str
    issues: tuple[Issue, ...] = ()
