"""The budget of a run: the most that it may spend before it pauses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from schemas.costs.prices import HOUR_S, Prices
from schemas.costs.work import Spent, add_spent


def _is_none(value: object) -> bool:
    return value is None


class Budget(BaseModel):
    """The most that a run may spend. It pauses before the step that would pass one of these."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    max_cost: float | None = Field(default=None, gt=0, le=1e9, exclude_if=_is_none)
    """US dollars for devices, judges and model providers, by the prices of the installation"""
    max_tokens: int | None = Field(default=None, ge=1, le=10**15, exclude_if=_is_none)
    """tokens that the policy generates, in validations too; where nothing is sampled, tokens of rows"""
    max_hours: float | None = Field(default=None, gt=0, le=1e9, exclude_if=_is_none)
    """device-hours, of all kinds of devices together"""

    @staticmethod
    def is_open(budget: "Budget") -> bool:
        """Whether a budget limits nothing."""
        return not budget.limits

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits that are set, by name."""
        found = {
            "max_cost": self.max_cost,
            "max_tokens": self.max_tokens,
            "max_hours": self.max_hours,
        }
        return {name: float(limit) for name, limit in found.items() if limit is not None}

    def with_limits(self, other: "Budget") -> "Budget":
        """Return this budget with the limits that `other` sets."""
        return self.model_copy(update=other.model_dump(exclude_none=True))


BudgetTable = Annotated[Budget, Field(exclude_if=Budget.is_open)]
"""The budget in a config. One without limits is left out of its bytes."""


@dataclass(frozen=True, slots=True)
class Spending:
    """Amounts that were used: device-seconds by kind of device (`spent`), tokens, the US dollars that
    judges and providers cost, and their tokens whose price they did not name."""

    spent: Spent = field(default_factory=dict)
    tokens: int = 0
    calls_usd: float = 0.0
    calls_tokens: int = 0

    def __add__(self, other: "Spending") -> "Spending":
        return Spending(
            add_spent([self.spent, other.spent]),
            self.tokens + other.tokens,
            self.calls_usd + other.calls_usd,
            self.calls_tokens + other.calls_tokens,
        )

    def __sub__(self, other: "Spending") -> "Spending":
        negative = {device: -seconds for device, seconds in other.spent.items()}
        return Spending(
            add_spent([self.spent, negative]),
            self.tokens - other.tokens,
            self.calls_usd - other.calls_usd,
            self.calls_tokens - other.calls_tokens,
        )

    def amounts(self, prices: Prices) -> Mapping[str, float]:
        """Return the amounts that a budget limits, by the names of its limits."""
        devices = prices.devices_usd(self.spent) or 0.0
        return {
            "max_cost": devices + self.calls_usd + prices.calls_usd(self.calls_tokens),
            "max_tokens": float(self.tokens),
            "max_hours": sum(self.spent.values()) / HOUR_S,
        }
