"""The spending of a run, from its own facts, and whether its budget allows another step. Pure functions.

The cost of a step is what the run spent between the settlements of two steps without its validations,
so it holds checkpoints, and in asynchronous modes the samples that are generated ahead. The next step is
expected to cost as much as the most expensive of the last few. Validations run beside later steps, and
each is expected to cost as much as the one before.
"""

from dataclasses import dataclass, field, replace

from schemas.costs.budget import Budget, Spending
from schemas.costs.prices import Prices
from schemas.events import BudgetExhausted, EvaluationSettled, GroupsSettled, StepSettled
from schemas.sampling import JudgeUsage

LAST_STEPS = 3
"""The next step is expected to cost as much as the most expensive of this many."""

UNITS = {"max_cost": "US dollars", "max_tokens": "tokens", "max_hours": "device-hours"}


@dataclass(frozen=True, slots=True)
class RunSpending:
    """`total` is everything so far, `settled` that of all steps but the current one, and `steps` are
    those of the last few steps. `validation` is that of the last validation that ended."""

    total: Spending = field(default_factory=Spending)
    settled: Spending = field(default_factory=Spending)
    steps: tuple[Spending, ...] = ()
    validation: Spending | None = None

    def add(self, part: Spending) -> "RunSpending":
        return replace(self, total=self.total + part)

    def add_validation(self, part: Spending) -> "RunSpending":
        """Add a validation, which belongs to no step."""
        return replace(self, total=self.total + part, settled=self.settled + part, validation=part)

    def begin(self) -> "RunSpending":
        """Begin the first step. What the start cost is the cost of no step."""
        return replace(self, settled=self.total)

    def settle_step(self) -> "RunSpending":
        """End a step and begin the next one."""
        steps = (*self.steps, self.total - self.settled)[-LAST_STEPS:]
        return replace(self, settled=self.total, steps=steps)


def spending_of_groups(event: GroupsSettled) -> Spending:
    """Return what settled groups cost."""
    total = Spending()
    for group in event.groups:
        judged = group.judged or JudgeUsage()
        total += Spending(
            group.spent,
            sum(entry.completion_tokens for entry in group.entries),
            judged.usd + sum(entry.usd or 0.0 for entry in group.entries),
            0 if judged.usd else judged.tokens,
        )
    return total


def spending_of_step(event: StepSettled, *, counts_rows: bool) -> Spending:
    """Return what the learner's part of a step cost. With `counts_rows` nothing is sampled, and the
    tokens of the rows count."""
    tokens = int(event.metrics.get("train/tokens", 0.0)) if counts_rows else 0
    return Spending(event.spent, tokens)


def spending_of_validation(event: EvaluationSettled) -> Spending:
    """Return what a validation cost."""
    return Spending(event.spent, int(event.metrics.get("eval/tokens", 0.0)), event.usd)


def find_exhausted(
    spending: RunSpending, budget: Budget, prices: Prices, *, run: str, step: int, validations: int
) -> BudgetExhausted | None:
    """Return which limit the step after `step` would pass, or None. `validations` are those that run now
    and that of the next step."""
    used = spending.total.amounts(prices)
    steps = [part.amounts(prices) for part in spending.steps]
    validation = (spending.validation or Spending()).amounts(prices)
    for name, most in budget.limits.items():
        estimate = max((amounts[name] for amounts in steps), default=0.0)
        estimate += validations * validation[name]
        if used[name] + estimate > most:
            found = {"limit": name, "most": most, "used": used[name], "estimate": estimate}
            return BudgetExhausted.model_validate({"run": run, "step": step, **found})
    return None


def exhausted_message(event: BudgetExhausted) -> str:
    """Why a run pauses, and how it goes on."""
    unit = UNITS[event.limit]
    return (
        f"the budget allows {_amount(event.most)} {unit} ({event.limit}), {_amount(event.used)} are "
        f"used, and a step takes up to {_amount(event.estimate)}; go on with `headrace train resume "
        f"{event.run} --raise {event.limit}=AMOUNT`"
    )


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
