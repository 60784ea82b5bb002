"""The state of a run, computed event by event, for `train watch` and the demo."""

from dataclasses import dataclass, field
from datetime import datetime

from infra.readmodel.estimates import Interval, interval_of
from producers.cli.display.output import Document

TYPES = (
    "rl.run.requested",
    "rl.run.rejected",
    "rl.run.started",
    "rl.policy.initialized",
    "rl.groups.requested",
    "rl.batch.assembled",
    "rl.step.settled",
    "rl.step.skipped",
    "rl.run.warned",
    "rl.checkpoint.requested",
    "rl.checkpoint.settled",
    "rl.evaluation.requested",
    "rl.evaluation.settled",
    "rl.run.paused",
    "rl.run.resumed",
    "rl.run.stop-requested",
    "rl.run.stopped",
    "rl.run.failed",
    "rl.run.finished",
)
"""The types of the events that a view is computed from. The many events of samples and groups are not
needed."""

HELD_OUT_LOSS = "eval/validation/loss"
TEACHER_KL = "train/teacher_kl"
HELD_OUT_ACCURACY = "eval/validation/accuracy"
POOL = "pool/"
"""The beginning of the metrics that count the rows in a pool."""

RECENT = 10
"""How many recent steps count for the mean duration that predicts the remaining time."""

PHASES = {
    "rl.run.requested": "sync",
    "rl.run.started": "setup",
    "rl.policy.initialized": "train",
    "rl.groups.requested": "generate",
    "rl.batch.assembled": "learn",
    "rl.evaluation.requested": "validate",
    "rl.checkpoint.requested": "checkpoint",
    "rl.run.paused": "paused",
    "rl.run.resumed": "train",
    "rl.run.stop-requested": "stopping",
}

STATUSES = {
    "rl.run.started": "running",
    "rl.run.paused": "paused",
    "rl.run.resumed": "running",
    "rl.run.finished": "finished",
    "rl.run.failed": "failed",
    "rl.run.rejected": "failed",
    "rl.run.stopped": "stopped",
}


@dataclass
class RunView:
    """The state of a run so far. `rewards` and `losses` have one value per settled step. `validations`
    are pairs of step and held-out reward, `held_out_losses` the same for runs that sample nothing, and
    `held_out_accuracies` for those that learn from pairs.
    `rates` are tokens per second, one value per step. `pools` are the rows in each pool of a curriculum,
    and in none, when the rows of the last step were chosen. `is_taught` says that the loss is that of a
    teacher, so that rewards alone would not show what is learned."""

    status: str = "pending"
    phase: str = "init"
    step: int = 0
    total_steps: int = 0
    samples_per_step: int = 0
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    held_out_interval: Interval | None = None
    held_out_losses: list[tuple[int, float]] = field(default_factory=list)
    held_out_accuracies: list[tuple[int, float]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    pools: dict[str, int] = field(default_factory=dict)
    is_taught: bool = False
    warnings: list[str] = field(default_factory=list)
    message: str | None = None
    first_step: int = 0
    """the step with whose state the run begins; above 0 in a fork"""
    batch_at: datetime | None = None
    step_s: list[float] = field(default_factory=list)
    """seconds of each timed step, without pauses"""

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds for the remaining steps, from the duration of the most recent ones."""
        recent = self.step_s[-RECENT:]
        if self.status != "running" or not recent or not self.total_steps:
            return None
        return sum(recent) / len(recent) * max(0, self.total_steps - self.step)

    @property
    def has_ended(self) -> bool:
        return self.status in ("finished", "failed", "stopped", "crashed", "killed")

    def fold(self, event: Document) -> None:
        """Apply one more event. Events of unknown types change nothing."""
        kind = str(event.get("type"))
        data: Document = event.get("data") or {}
        self.status = STATUSES.get(kind, self.status)
        self.phase = "complete" if self.has_ended else PHASES.get(kind, self.phase)
        match kind:
            case "rl.run.started":
                plan: Document = data.get("plan") or {}
                self.total_steps = int(plan.get("total_steps") or 0)
                sizes = plan.get("batch_size") or 0, plan.get("num_samples") or 1
                self.samples_per_step = int(sizes[0]) * int(sizes[1])
                self.first_step = int((data.get("fork") or {}).get("step") or 0)
            case "rl.step.settled":
                self._fold_step(data, at=_time(event))
            case "rl.evaluation.settled" if data.get("reward") is not None:
                self.validations.append((int(data["step"]), float(data["reward"])))
                self.held_out_interval = interval_of(data.get("metrics") or {}, "eval/reward")
            case "rl.checkpoint.settled":
                self.checkpoints.append(int(data["step"]))
            case "rl.run.warned":
                self.warnings.append(str(data.get("message")))
            case "rl.run.failed" | "rl.run.rejected":
                self.message = str(data.get("message"))
                if data.get("kind") == "crash":
                    self.status = "crashed"
            case "rl.policy.initialized" | "rl.run.resumed":
                self.batch_at = _time(event)

    def _fold_step(self, data: Document, *, at: datetime | None) -> None:
        self.step = int(data["step"])
        metrics: Document = data.get("metrics") or {}
        if "rollout/raw_reward" in metrics:
            self.rewards.append(float(metrics["rollout/raw_reward"]))
        if "train/loss" in metrics:
            self.losses.append(float(metrics["train/loss"]))
        self.is_taught = TEACHER_KL in metrics
        if HELD_OUT_LOSS in metrics:
            self.held_out_losses.append((self.step, float(metrics[HELD_OUT_LOSS])))
        if HELD_OUT_ACCURACY in metrics:
            self.held_out_accuracies.append((self.step, float(metrics[HELD_OUT_ACCURACY])))
        sizes = {key: size for key, size in metrics.items() if key.startswith(POOL)}
        self.pools = {key.removeprefix(POOL): int(size) for key, size in sizes.items()}
        if self.step == self.first_step:
            self.batch_at = at
            return
        if at and self.batch_at:
            self.step_s.append((at - self.batch_at).total_seconds())
        tokens = metrics.get("train/tokens")
        if tokens is None and "rollout/total_lengths" in metrics:
            tokens = float(metrics["rollout/total_lengths"]) * self.samples_per_step
        if tokens and at and self.batch_at and at > self.batch_at:
            self.rates.append(float(tokens) / (at - self.batch_at).total_seconds())
        self.batch_at = at


def _time(event: Document) -> datetime | None:
    text = event.get("time")
    return datetime.fromisoformat(str(text)) if text else None
