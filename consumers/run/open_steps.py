"""The parts of a run's state that are about single steps: whose groups are requested, that need a
checkpoint, that were validated."""

from dataclasses import dataclass, field
from uuid import UUID

from infra.readmodel.estimates import Interval
from schemas.events import SettledGroup
from schemas.specs import GroupTemplate, StateRef


@dataclass(frozen=True, slots=True)
class OpenStep:
    """A step whose groups are requested: how many there are, and the settled ones by slot. `rows` are
    those that it began with, in the order of its slots. `replaced` are the groups that were taken out of
    their slots, `numbers` counts them by slot, and `replacing` are the rows in their place."""

    num_slots: int
    settled: dict[int, SettledGroup] = field(default_factory=dict)
    template: GroupTemplate | None = None
    rows: tuple[int, ...] = ()
    numbers: dict[int, int] = field(default_factory=dict)
    replacing: dict[int, int] = field(default_factory=dict)
    replaced: tuple[SettledGroup, ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.settled) == self.num_slots

    def row_of(self, slot: int) -> int:
        """The row whose group is in this slot now."""
        return self.replacing[slot] if slot in self.replacing else self.rows[slot]


@dataclass(frozen=True, slots=True)
class Due:
    """A settled step that needs a checkpoint, with everything that its manifest is made from."""

    step: int
    state: StateRef
    batch: UUID | None
    plan: tuple[int, ...]
    versions: dict[str, str]
    reward: float | None


@dataclass(frozen=True, slots=True)
class ValidationReward:
    """The mean reward of the validation of a step, and its 95 % interval."""

    step: int
    reward: float
    interval: Interval | None = None
