"""Forks a run: a child begins with the state that its parent had right after a step, and goes on with
another config, or with the same one.

The child is an ordinary run. Its request names the place in the parent's log up to which its state is
the parent's (`schemas/models/fork.py`), and no artifact is copied. What cannot change, because the state
at the step follows from it, is refused. What changes is said with the first step that it matters for.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from uuid import UUID

from pydantic_core import PydanticCustomError

from infra.readmodel.run_pages import RunPages
from infra.readmodel.runs import PageRange
from infra.readmodel.state_at_event import StateAtEvent
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from producers.core.lookup import Lookup
from producers.core.submit import ForkOrigin, Resolved, SubmitRequest, Submitter
from producers.core.validation.fork_issues import flatten, require_forkable
from schemas.algorithms import samples_nothing
from schemas.config import RunConfig
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import RunRequested, RunStarted
from schemas.ids import run_stream
from schemas.limits import pace_of
from schemas.models.fork import ForkPoint
from schemas.toml.overrides import apply_overrides, check_overrides
from schemas.toml.parser import parse_run

STEP = re.compile(r"[0-9]{1,9}")

MADE_OF = ("experiment.commit_sha", "experiment.branch")
"""The keys that say which commit runs. The fork of a run names the commit that its parent ran."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request to fork a run. `at` is a step, the id of an event or its cursor. `config` replaces the
    parent's TOML, `changes` replace single keys, and `commit` and `seed` are further changes."""

    parent: str
    at: str
    changes: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    commit: str | None = None
    seed: int | None = None
    replay_samples: bool = False

    @property
    def chooses_code(self) -> bool:
        """Whether the sender names the commit, or a TOML that does, and does not take the parent's."""
        named = self.commit is not None or self.config is not None
        return named or any(key in self.changes for key in MADE_OF)


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key that differs from the parent's, and the first step that it matters for."""

    key: str
    parent: object
    child: object
    from_step: int


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """A valid fork: the request that submits it, what its names refer to, the keys that differ, and what
    a user should know before it starts."""

    request: SubmitRequest
    resolved: Resolved
    point: ForkPoint
    parent: RunRequested
    total_steps: int
    changes: tuple[KeyChange, ...]
    notes: tuple[str, ...]
    replayed_up_to: int | None


class Forks:
    """Plans and submits forks."""

    def __init__(
        self,
        log: EventStore,
        *,
        lookup: Lookup,
        past: StateAtEvent,
        pages: RunPages,
        submitter: Submitter,
    ) -> None:
        self._log = log
        self._lookup = lookup
        self._past = past
        self._pages = pages
        self._submitter = submitter

    async def plan(
        self, wanted: ForkRequest, request: SubmitRequest, *, dry_run: bool = False
    ) -> PlannedFork:
        """Validate a fork, and say what it changes. `request` has who forks, and the name of the child,
        which a dry run looks up. Raises NotFound when there is no such run, step or event, Conflict when
        the parent is archived or has no such step yet, and InvalidConfig for keys that are wrong or
        cannot change."""
        parent = await self._find_parent(wanted.parent)
        point = await self._find_point(parent, wanted)
        commit = await self._commit_of(parent)
        document = _document(parent, wanted, commit)
        steps = require_forkable(parent, parse_run(document), point)
        _, number = await self._pages.forks(parent.run, PageRange(limit=0))
        if not wanted.chooses_code and await self._is_pushed(parent):
            request = replace(request, submitter=None)
        request = replace(
            request,
            config=document,
            workspace=parent.owner_workspace,
            fork=ForkOrigin(parent, point, number + 1),
        )
        resolve = self._submitter.try_run if dry_run else self._submitter.resolve_run
        resolved = await resolve(request)
        config = resolved.config
        replayed = _replayed_up_to(config, point, steps) if point.replay_samples else None
        return PlannedFork(
            request=request,
            resolved=resolved,
            point=point,
            parent=parent,
            total_steps=steps,
            changes=tuple(_changes(parent.config, config, commit, point.step + 1)),
            notes=tuple(_notes(parent, config, point, steps, replayed)),
            replayed_up_to=replayed,
        )

    async def submit(self, planned: PlannedFork, *, key: str) -> Recorded:
        """Append the request of a planned fork. The same fork under the same key makes one run. Raises
        what `Submitter.submit_run` does."""
        return await self._submitter.submit_run(planned.request, key=key)

    async def _find_parent(self, ref: str) -> RunRequested:
        try:
            return await self._lookup.whole_run(ref)
        except NotFound:
            try:
                await self._lookup.evaluation(ref)
            except NotFound:
                pass
            else:
                raise InvalidConfig(
                    f"{ref} is an evaluation, which trains nothing and cannot be forked; fork the run "
                    "that it measures"
                ) from None
            raise

    async def _find_point(self, parent: RunRequested, wanted: ForkRequest) -> ForkPoint:
        step = await self._step_at(parent, wanted.at)
        found = await self._past.settled_step(parent.run, step)
        if found is None:
            newest = await self._past.newest_settled(parent.run, END)
            raise Conflict(_no_step_text(parent.run_name, step, newest, parent.fork))
        return ForkPoint(
            parent=parent.run,
            step=step,
            position=found.position,
            policy_position=found.policy_position,
            replay_samples=wanted.replay_samples,
        )

    async def _step_at(self, parent: RunRequested, at: str) -> int:
        """The step that a fork begins after. Raises InvalidConfig when `at` names none, and NotFound for
        an event that the run does not have."""
        if STEP.fullmatch(at):
            return int(at)
        name = parent.run_name
        cursor = await self._cursor_at(parent, at)
        step = await self._past.newest_settled(parent.run, cursor)
        if step is None:
            raise Conflict(
                f"run {name} had settled no step at event {at}, so there is nothing to fork yet; name a "
                "later event, or submit a new run"
            )
        return step

    async def _cursor_at(self, parent: RunRequested, at: str) -> Cursor:
        unknown = NotFound(
            f"run {parent.run_name} has no event {at}; `headrace events {parent.run_name}` lists "
            "its events"
        )
        try:
            found = await self._past.cursor_of(parent.run, UUID(at))
        except ValueError:
            try:
                found = Cursor.parse(at)
            except ValueError:
                message = (
                    f"must be a step from 0, or an event's id or cursor, got {at[:80]!r}; for example "
                    f"{parent.run_name}@20"
                )
                raise InvalidConfig(f"at {message}", issues=(Issue("at", message),)) from None
            if await self._past.place(parent.run, found) is None:
                raise unknown from None
        if found is None:
            raise unknown
        return found

    async def _is_pushed(self, run: RunRequested) -> bool:
        """Whether a push chose the code that a run or the run that it continues runs. Its author may be
        unknown, so a fork that takes it over gets no personal secrets."""
        while run.origin is None and run.fork is not None and run.submitter is None:
            found = await self._log.events_at([(run_stream(run.fork.parent), 1)])
            parent = found[0].event if found else None
            if not isinstance(parent, RunRequested):
                return False
            run = parent
        return run.origin is not None

    async def _commit_of(self, parent: RunRequested) -> str | None:
        """The commit that the parent runs."""
        types = [RunStarted.type]
        for recorded in await self._log.read(parent.run, after=Cursor(), limit=1, types=types):
            if isinstance(recorded.event, RunStarted):
                return recorded.event.commit
        return None


END = Cursor(2**62, 2**62)


def _no_step_text(name: str, step: int, newest: int | None, fork: ForkPoint | None) -> str:
    if newest is None:
        return (
            f"run {name} has settled no step yet, so it cannot be forked; wait for its first step"
        )
    first = fork.step if fork else 0
    return (
        f"run {name} has no step {step}: it has steps {first} to {newest}; fork it at one of these"
        + (f", or fork its parent {fork.parent}" if fork and step < first else "")
    )


def _document(
    parent: RunRequested, wanted: ForkRequest, commit: str | None
) -> Mapping[str, object]:
    """The TOML of a fork: its parent's with the changes, at the parent's commit. Raises
    InvalidConfig."""
    own = parent.config.model_dump(mode="json", exclude_defaults=True)
    document = dict(own if wanted.config is None else wanted.config)
    pinned = wanted.commit or (commit if wanted.config is None else None)
    if pinned is not None and parent.config.experiment.rollout is not None:
        experiment = {k: v for k, v in _table(document, "experiment").items() if k != "branch"}
        document["experiment"] = {**experiment, "commit_sha": pinned}
    elif wanted.commit is not None:
        message = "has no code, so it has no grader to replace; leave the commit out"
        raise InvalidConfig(f"the run {message}", issues=(Issue("commit", message),))
    document = apply_overrides(document, _nest_changes(wanted.changes))
    if wanted.seed is not None:
        document = apply_overrides(document, {"advanced": {"seed": wanted.seed}})
    return document


def _nest_changes(changes: Mapping[str, object]) -> Mapping[str, object]:
    """Changes such as `{"training.lr": 1e-4}` as tables. Raises InvalidConfig."""
    try:
        return check_overrides(dict(changes))
    except PydanticCustomError as error:
        raise InvalidConfig(f"set {error}", issues=(Issue("set", str(error)),)) from error


def _table(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _changes(
    parent: RunConfig, child: RunConfig, commit: str | None, first: int
) -> Iterator[KeyChange]:
    ours, theirs = flatten(child), flatten(parent)
    theirs["experiment.commit_sha"] = commit
    for key in sorted(ours.keys() | theirs.keys()):
        if key != "experiment.branch" and ours.get(key) != theirs.get(key):
            yield KeyChange(key, theirs.get(key), ours.get(key), first)


def _replayed_up_to(config: RunConfig, point: ForkPoint, steps: int) -> int | None:
    """The last step whose groups may take recorded samples, because they sample with a version that the
    parent has too. None if nothing is sampled."""
    if samples_nothing(config.advanced):
        return None
    pace, step = pace_of(config), point.step + 1
    while step < steps and pace.pinned_version(step + 1) <= point.step:
        step += 1
    return step


def _notes(
    parent: RunRequested, config: RunConfig, point: ForkPoint, steps: int, replayed: int | None
) -> Iterator[str]:
    first, name = point.step + 1, parent.run_name
    if samples_nothing(config.advanced):
        yield f"the rows of the dataset are learned in {_steps(first, steps)}; nothing is sampled"
        return
    if replayed is not None:
        yield (
            f"samples that {name} recorded are used in {_steps(first, replayed)}, wherever it sampled "
            "the same row in the same way; they are graded again"
        )
        if replayed < steps:
            later = _steps(replayed + 1, steps)
            yield f"samples are generated in {later}, because their weights differ"
        return
    ahead = min(point.step + pace_of(parent.config).depth, steps)
    if ahead >= first:
        yield (
            f"groups that {name} had in flight at the fork are generated again in "
            f"{_steps(first, ahead)}; --replay-samples uses the recorded ones"
        )
    if ahead < steps:
        yield f"samples are generated in {_steps(max(first, ahead + 1), steps)}"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
