"""Finds runs, evaluations and checkpoints by name or id. It reads the log itself, so it never waits
for the read model, except for the metrics that choose a best checkpoint. For an API key that is
bound to a workspace or an organisation, the things of others do not exist."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from infra.names import Kind, Names, several_error
from infra.ports.actor import is_confined, may_see, visible_workspaces
from infra.spine.ports.event_log import Cursor, EventStore
from schemas.algorithms import SCORED
from schemas.artifact_refs import ArtifactRef
from schemas.deployments import ref_of_name
from schemas.errors import Conflict, InvalidConfig, NotFound
from schemas.events import (
    CheckpointSaved,
    CommitRequested,
    EvaluationImported,
    EvaluationRequested,
    Event,
    RunArchived,
    RunRenamed,
    RunRequested,
)
from schemas.ids import StreamName, checkpoint_stream, eval_stream, is_id, run_stream
from schemas.sampling import ModelRef
from schemas.specs import CheckpointSpec

CHECKPOINT = re.compile(
    r"^(?P<run>[^@\s/]+)@(?P<step>[0-9]{1,9}|last|best(?::(?P<metric>[A-Za-z0-9_./-]{1,120}))?)$"
)

LOWER_IS_BETTER = ("loss", "kl", "grad_norm", "perplexity", "truncated_ratio")
"""How the names of metrics end of which the lowest value is the best one."""


KnownEvaluation = EvaluationRequested | EvaluationImported
"""The event that an evaluation begins with."""

T = TypeVar("T", RunRequested, KnownEvaluation)


class Curves(Protocol):
    """The metrics of runs."""

    async def metric_keys(self, run: str) -> list[str]:
        """The names of the metrics that a run has."""
        ...

    async def curve(self, run: str, key: str) -> list[tuple[int, float]]:
        """One metric of a run as (step, value), in order of step."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved checkpoint and the run it belongs to."""

    run: RunRequested
    saved: CheckpointSaved
    at: datetime

    @property
    def spec(self) -> CheckpointSpec:
        return self.saved.spec

    @property
    def ref(self) -> str:
        return f"{self.run.run_name}@{self.spec.step}"

    @property
    def is_reward_model(self) -> bool:
        return self.run.config.advanced.algorithm in SCORED

    def files(self) -> dict[str, ArtifactRef]:
        """The files of the checkpoint's directory, including the weights."""
        weights = self.spec.state.weights
        return {**self.spec.files, **({self.spec.weights_name: weights} if weights else {})}

    def model(self) -> ModelRef:
        """The checkpoint as a model to sample from or to start from. Raises InvalidConfig when it is a
        reward model."""
        if self.is_reward_model:
            raise InvalidConfig(
                f"{self.ref} is a reward model, which scores answers and writes none; name it in "
                "advanced.reward_models, and here a checkpoint of another algorithm"
            )
        return ModelRef(
            kind="checkpoint",
            name=f"{self.spec.run}@{self.spec.step}",
            dtype=self.spec.model.dtype,
            files=self.files(),
        )


class Lookup:
    """Finds runs and checkpoints by name or id. All methods raise NotFound, which says what to do
    next."""

    def __init__(
        self,
        log: EventStore,
        names: Names,
        *,
        curves: Curves | None = None,
        workspace: str | None = None,
    ) -> None:
        """Without `curves`, no checkpoint is found by a metric. With a `workspace` (id), a name of
        one of its things means that one, whatever others have the name."""
        self._log = log
        self._names = names
        self._curves = curves
        self._workspace = workspace

    def within(self, workspace: str | None) -> "Lookup":
        """The same lookup for a request that names a workspace (id)."""
        return Lookup(self._log, self._names, curves=self._curves, workspace=workspace)

    async def run(self, ref: str) -> RunRequested:
        """The event that requested the run, with the run's current name."""
        found = [await self._requested_run(identity) for identity in await self._ids("run", ref)]
        seen = [one for one in found if one is not None]
        if not seen:
            raise await self._unknown("run", ref, "`headrace train list` shows all")
        event = await self._only("run", ref, seen)
        identity = event.run
        names = [RunRenamed.type, RunArchived.type]
        for recorded in await self._log.read(identity, after=Cursor(), limit=1000, types=names):
            if isinstance(recorded.event, RunRenamed | RunArchived):
                event = event.model_copy(update={"run_name": recorded.event.run_name})
        return event

    async def _requested_run(self, identity: str) -> RunRequested | None:
        """The event that requested a run, if this task may see it."""
        event = await self._first(run_stream(identity), identity, RunRequested.type)
        is_seen = isinstance(event, RunRequested) and may_see(event.owner_workspace)
        return event if is_seen and isinstance(event, RunRequested) else None

    async def whole_run(self, ref: str) -> RunRequested:
        """Like `run`, but the run's history must be in the log. Raises NotFound, and Conflict when the
        run is archived."""
        found = await self.run(ref)
        types = [RunArchived.type]
        if await self._log.read(found.run, after=Cursor(), limit=1, types=types):
            raise archived_error(found.run_name)
        return found

    async def find_import(self, evaluation: str) -> EvaluationImported | None:
        """The event that imported an evaluation (an id that the read model has); None when it was made
        here."""
        types = [EvaluationImported.type]
        for recorded in await self._log.read(evaluation, after=Cursor(), limit=1, types=types):
            if isinstance(recorded.event, EvaluationImported):
                return recorded.event
        return None

    async def evaluation(self, ref: str) -> KnownEvaluation:
        """The event that requested an evaluation, or that imported it."""
        seen: list[KnownEvaluation] = []
        for identity in await self._ids("evaluation", ref):
            for kind in (EvaluationRequested, EvaluationImported):
                event = await self._first(eval_stream(identity), identity, kind.type)
                if isinstance(event, KnownEvaluation) and await self._may_see(event):
                    seen.append(event)
                    break
        if not seen:
            raise await self._unknown("evaluation", ref, "`headrace eval list` shows all")
        return await self._only("evaluation", ref, seen)

    async def checkpoint(self, ref: str) -> Checkpoint:
        """The checkpoint that `run@step`, `run-step-N`, `run@last`, `run@best` or `run@best:METRIC`
        names. The best one has the highest reward, or the best value of the metric at its step; among
        equal ones it is the latest."""
        parts = CHECKPOINT.fullmatch(ref_of_name(ref))
        if parts is None:
            raise NotFound(
                f"{ref!r} is not the name of a checkpoint; write run@step, run-step-N, run@last, "
                "run@best or run@best:METRIC"
            )
        run = await self.run(parts["run"])
        stream = checkpoint_stream(run.run)
        loaded = await self._log.load({stream: 0})
        saved = {
            recorded.event.spec.step: Checkpoint(run, recorded.event, recorded.time)
            for recorded in loaded[stream]
            if isinstance(recorded.event, CheckpointSaved)
        }
        if not saved:
            raise NotFound(f"run {run.run_name} has no checkpoint yet; wait for its first one")
        if parts["step"] == "last":
            return saved[max(saved)]
        if parts["metric"]:
            return await self._best_by(parts["metric"], run, saved)
        if parts["step"] == "best":
            return _best(run.run_name, saved)
        if int(parts["step"]) not in saved:
            steps = ", ".join(map(str, sorted(saved)))
            raise NotFound(f"run {run.run_name} has no checkpoint {parts['step']}; it has: {steps}")
        return saved[int(parts["step"])]

    async def _best_by(
        self, metric: str, run: RunRequested, saved: dict[int, Checkpoint]
    ) -> Checkpoint:
        """The checkpoint at whose step a metric was best. In its name `.` may stand for `/`, because a
        URL may not hold a slash there."""
        keys = await self._curves.metric_keys(run.run) if self._curves else []
        key = next((key for key in keys if key.replace("/", ".") == metric.replace("/", ".")), None)
        if key is None or self._curves is None:
            known = ", ".join(keys) or "none"
            raise NotFound(f"run {run.run_name} has no metric {metric!r}; it has: {known}")
        found = [
            (value, step)
            for step, value in await self._curves.curve(run.run, key)
            if step in saved and math.isfinite(value)
        ]
        if not found:
            raise NotFound(
                f"no checkpoint of {run.run_name} is at a step with {key}; use {run.run_name}@last"
            )
        sign = -1 if key.endswith(LOWER_IS_BETTER) else 1
        return saved[max((sign * value, step) for value, step in found)[1]]

    async def _ids(self, kind: Kind, ref: str) -> list[str]:
        """The ids that a name or an id may refer to. A text with the form of an id is one, even if
        another thing has it as its name. The workspace that a request names comes first."""
        if is_id(ref):
            return [ref]
        if self._workspace is not None:
            own = await self._names.find_id(kind, ref, scope=self._workspace)
            if own is not None:
                return [own]
        visible = visible_workspaces()
        scopes = None if visible is None else [*visible, ""]
        holders = await self._names.find_holders(kind, ref, scopes=scopes)
        return list(dict.fromkeys(taken.id for taken in holders)) or [ref]

    async def _only(self, kind: Kind, ref: str, found: Sequence[T]) -> T:
        """The only thing that a name refers to. Raises Conflict when there are several."""
        if len(found) == 1:
            return found[0]
        places = [(one.run_id, await self._workspace_name(_workspace_of(one))) for one in found]
        raise several_error(kind, ref, places)

    async def _workspace_name(self, workspace: str | None) -> str | None:
        """The name of a workspace, as its first event has it; its id without one."""
        if workspace is None:
            return None
        types = [CommitRequested.type]
        for recorded in await self._log.read(workspace, after=Cursor(), limit=1, types=types):
            if isinstance(recorded.event, CommitRequested):
                return recorded.event.workspace_name
        return workspace

    async def _first(self, stream: StreamName, identity: str, kind: str) -> Event | None:
        """The event that opened a stream. A new event is not below the horizon yet, so the stream
        itself is read when the run's index does not have it."""
        for recorded in await self._log.read(identity, after=Cursor(), limit=1, types=[kind]):
            return recorded.event
        loaded = await self._log.load({stream: 0})
        return next((r.event for r in loaded[stream] if r.event.type == kind), None)

    async def _may_see(self, evaluation: KnownEvaluation) -> bool:
        """Whether this task may see an evaluation. That of a run belongs to the run's workspace."""
        if evaluation.run is None or not is_confined():
            return may_see(evaluation.workspace)
        return await self._requested_run(evaluation.run) is not None

    async def _unknown(self, kind: Kind, ref: str, hint: str) -> NotFound:
        known = [] if is_confined() else await self._names.all_names(kind)
        close = difflib.get_close_matches(ref, [taken.name for taken in known], n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        return NotFound(f"there is no {kind} {ref!r}; {meant}{hint}")


def _workspace_of(event: RunRequested | KnownEvaluation) -> str | None:
    """The workspace (id) of a run, or of an evaluation that a user asked for."""
    return event.owner_workspace if isinstance(event, RunRequested) else event.workspace


def archived_error(name: str) -> Conflict:
    """The error for a request that needs the history of an archived run."""
    return Conflict(
        f"run {name} is archived: its samples, metrics and events are not in the database; "
        f"`headrace train restore {name}` brings them back"
    )


def _best(run: str, saved: dict[int, Checkpoint]) -> Checkpoint:
    rewarded = [(c.saved.reward, step) for step, c in saved.items() if c.saved.reward is not None]
    if not rewarded:
        raise NotFound(f"no checkpoint of {run} has a reward; use {run}@last")
    return saved[max(rewarded)[1]]
