"""The queries of the cost ledger. An API key that is bound to a workspace or an organisation sees the
costs of its own runs and evaluations only."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from infra.ports.actor import visible_workspaces
from infra.spine.postgres.pool import Database
from infra.spine.postgres.queries import queries
from schemas.costs.archived import ArchivedCost
from schemas.costs.budget import Spending
from schemas.costs.prices import GB, Prices
from schemas.costs.work import Spent

SQL = queries("infra/costs/ledger.sql")

CostKey = Literal["run", "workspace", "organisation", "user", "step", "sample"]
COST_KEYS: tuple[CostKey, ...] = get_args(CostKey)
OF_ONE_RUN = ("run", "step", "sample")
OF_MANY_WORKSPACES = ("organisation", "user")
VALIDATION = "eval/validation/reward"
POINT = 0.01
"""A reward point: a hundredth of a reward of 1."""


@dataclass(slots=True)
class CostLine:
    """The costs of one run, workspace, user or step. `spent` are device-seconds by kind of device with
    those of lost attempts, `effects` the same by type of effect, and `wasted` only the lost ones by type
    of effect."""

    key: str
    name: str | None = None
    is_run: bool = False
    workspace_name: str | None = None
    spent: Spent = field(default_factory=dict)
    effects: dict[str, float] = field(default_factory=dict)
    wasted: dict[str, float] = field(default_factory=dict)
    wasted_by_device: Spent = field(default_factory=dict)
    sampled: int = 0
    trained: int = 0
    discarded: int = 0
    calls_usd: float = 0.0
    calls_tokens: int = 0
    stored_bytes: int = 0
    last_at: datetime | None = None

    @property
    def spending(self) -> Spending:
        return Spending(self.spent, self.sampled, self.calls_usd, self.calls_tokens)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of sums."""
        self.name, self.workspace_name = self.name or row["run_name"], row["workspace_name"]
        self.is_run = row["is_run"]
        if row["device"] is not None:
            total = row["device_s"] + row["wasted_s"]
            _add(self.spent, row["device"], total)
            _add(self.effects, row["effect"], total)
            if row["wasted_s"]:
                _add(self.wasted, row["effect"], row["wasted_s"])
                _add(self.wasted_by_device, row["device"], row["wasted_s"])
        self.sampled += row["sampled"]
        self.trained += row["trained"]
        self.discarded += row["discarded"]
        self.calls_usd += row["calls_usd"]
        self.calls_tokens += row["calls_tokens"]
        self.stored_bytes += row["stored_bytes"]
        self.last_at = max(filter(None, (self.last_at, row["last_at"])))

    def as_json(self, prices: Prices, *, gain: float | None = None) -> dict[str, object]:
        """Return the line with money, which is None where a price is missing. `gain` is by how much the
        reward grew."""
        cost = self.cost(prices)
        month = None if prices.gb_month is None else self.stored_bytes / GB * prices.gb_month
        return {
            "key": self.key,
            "is_run": self.is_run,
            "name": self.name,
            "workspace_name": self.workspace_name,
            "device_hours": {kind: s / 3600 for kind, s in sorted(self.spent.items())},
            "effects": {kind: round(s, 3) for kind, s in sorted(self.effects.items())},
            "wasted": {kind: round(s, 3) for kind, s in sorted(self.wasted.items())},
            "tokens_sampled": self.sampled,
            "tokens_trained": self.trained,
            "tokens_discarded": self.discarded,
            "calls_usd": self.calls_usd + prices.calls_usd(self.calls_tokens),
            "unpriced_devices": sorted(k for k in self.spent if prices.hour_of(k) is None),
            "cost": cost,
            "cost_wasted": prices.devices_usd(self.wasted_by_device),
            "stored_bytes": self.stored_bytes,
            "storage_usd_month": month,
            "reward_gain": gain,
            "cost_per_reward_point": cost * POINT / gain if cost and gain and gain > 0 else None,
            "last_at": self.last_at,
        }

    def cost(self, prices: Prices) -> float | None:
        """Return the US dollars of devices and calls; None if neither has a price."""
        devices = prices.devices_usd(self.spent)
        calls = self.calls_usd + prices.calls_usd(self.calls_tokens)
        return None if devices is None and not calls else (devices or 0.0) + calls


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run and what its own steps cost. `config` is its JSON."""

    run: str
    name: str
    config: str
    steps: int
    line: CostLine


class Costs:
    """Queries over the cost ledger."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def lines(
        self, by: CostKey, *, runs: Sequence[str] | None = None, since: datetime | None = None
    ) -> list[CostLine]:
        """Return a line for each key, those with most device-seconds first. `runs` (ids) and `since`
        narrow them. Steps are in order."""
        visible = visible_workspaces()
        rows = await self._pool.fetch(
            SQL.variant("sums", key=f"by_{by}"),
            None if runs is None else list(runs),
            since,
            None if visible is None else list(visible),
        )
        found: dict[str, CostLine] = {}
        for row in rows:
            found.setdefault(row["key"], CostLine(row["key"])).add(row)
        for line in found.values():
            if by not in OF_ONE_RUN:  # it has many runs, and any name would be that of one
                line.name = None
            if by in OF_MANY_WORKSPACES:
                line.workspace_name = None
        if by == "step":
            return sorted(found.values(), key=_step_of)
        return sorted(found.values(), key=lambda line: (-sum(line.spent.values()), line.key))

    async def runs_of_model(self, model: str) -> Sequence[PastRun]:
        """Return the newest runs of a model (as a config names it) that have cost something."""
        visible = visible_workspaces()
        rows = await self._pool.fetch(
            SQL["runs_of_model"], model, None if visible is None else list(visible)
        )
        lines = {line.key: line for line in await self.lines("run", runs=[r["run"] for r in rows])}
        return [
            PastRun(row["run"], row["name"], row["config"], row["steps"], lines[row["run"]])
            for row in rows
            if row["run"] in lines
        ]

    async def summary(self, run: str) -> tuple[ArchivedCost, ...]:
        """Return the sums of a run (its id) by type of effect and kind of device, of the events that
        leave the log when it is archived."""
        rows = await self._pool.fetch(SQL["summary_of_run"], run)
        return tuple(ArchivedCost.model_validate(dict(row)) for row in rows)

    async def gains(self, runs: Sequence[str]) -> Mapping[str, float]:
        """Return by how much the reward of runs grew, from their first to their last validation, or else
        from the first to the last step. A run without two of either is not there, and neither is one
        that diverged."""
        rows = await self._pool.fetch(SQL["rewards"], list(runs))
        gains: dict[str, float] = {}
        for row in sorted(rows, key=lambda row: row["key"] == VALIDATION):
            if row["points"] > 1:
                gains[row["run"]] = row["last"] - row["first"]
        # JSON has no number for the reward of a run that diverged.
        return {run: gain for run, gain in gains.items() if math.isfinite(gain)}


async def costs_of_runs(
    costs: Costs, runs: Sequence[str], prices: Prices
) -> Mapping[str, Mapping[str, object]]:
    """Return what these runs (ids) cost, for those that cost anything yet."""
    lines = await costs.lines("run", runs=runs)
    gains = await costs.gains(runs)
    return {line.key: line.as_json(prices, gain=gains.get(line.key)) for line in lines}


def total_of(lines: Sequence[CostLine]) -> CostLine:
    """Return the sum of all lines."""
    total = CostLine("total")
    for line in lines:
        for mine, theirs in (
            (total.spent, line.spent),
            (total.effects, line.effects),
            (total.wasted, line.wasted),
            (total.wasted_by_device, line.wasted_by_device),
        ):
            for kind, seconds in theirs.items():
                _add(mine, kind, seconds)
        total.sampled += line.sampled
        total.trained += line.trained
        total.discarded += line.discarded
        total.calls_usd += line.calls_usd
        total.calls_tokens += line.calls_tokens
        total.stored_bytes += line.stored_bytes
    return total


def _add(sums: dict[str, float], key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def _step_of(line: CostLine) -> tuple[str, int]:
    owner, _, step = line.key.rpartition("@")
    return owner, int(step)
