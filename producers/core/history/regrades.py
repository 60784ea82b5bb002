"""Regrades, which grade the recorded samples of a run again. This module requests them, and finds them
in the log itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from infra.ports.actor import is_confined
from infra.repositories.git.refs import checked_branch
from infra.repositories.git.urls import is_path
from infra.settings.network_policy import NO_NETWORK, NetworkPolicy
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.history.regrade_views import RegradeView, view_regrade
from producers.core.lookup import Lookup
from producers.core.submit import KEY_USED
from producers.core.validation.judge_issues import judge_issues
from producers.core.workspaces import Workspace, Workspaces
from schemas.algorithms import COMPARES_PARTS, GROUPED, REINFORCED
from schemas.config import RewardWeight, RubricWeight, RunConfig
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound, Refused
from schemas.events import (
    CommitRequested,
    Event,
    GradientComparisonCompleted,
    GroupGraded,
    RegradeCompleted,
    RegradePartGraded,
    RegradeRequested,
    RegradeSource,
    RegradeStarted,
    RunRequested,
    RunStarted,
)
from schemas.events.regrades.groups import GRADER_PART, RegradedGroups, part_names
from schemas.ids import GroupKey, gradients_stream, is_id, regrade_stream, short_id
from schemas.sampling import Grade
from schemas.specs import CommitSpec, Entrypoint, RolloutRef, RubricSpec, rubric_specs
from schemas.toml.rubric_keys import rubric_issues

E = TypeVar("E", bound=Event)

PREFIX = "regrade:"
"""How the name of a regrade begins where a run could be named too."""

SHA = re.compile(r"[0-9a-f]{7,40}")
TREE = re.compile(r"[0-9a-f]{40}")
PART = re.compile(r"[^\W\d]\w{0,99}")
"""The form of the name of a reward function or of a score."""

RUBRICS_KEY = "advanced.rubrics"
ASKED = {
    *("base", "source", "commit", "rubrics", "weights"),
    *("steps", "share", "threshold", "gradients"),
}
"""The fields of an event that say what its sender asked for."""

MOST_AT_ONCE = 16
"""The most regrades of a run that have not ended. Each is an owner of effects of its own, so without a
limit those of one run would take the turns of all other runs."""

MOST_REGRADES = 1000
"""The most regrades of a run that a list shows."""
LISTED = (RegradeRequested, RegradeCompleted, GradientComparisonCompleted)
"""The events from which the list of a run's regrades is made."""


@dataclass(frozen=True, slots=True)
class RegradeWish:
    """A request for a regrade. `grader` is a commit or a branch, and `tree` a commit that was
    made of a working tree. `rubrics` are tables as in `[[advanced.rubrics]]`."""

    grader: str | None = None
    tree: str | None = None
    rubrics: Sequence[RubricWeight] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    share: float = 1.0
    threshold: float = 1.0
    gradients: bool = False
    submitter: str | None = None
    requester: str | None = None

    @property
    def source(self) -> RegradeSource:
        if self.tree is not None:
            return "working tree"
        if self.grader is not None:
            return "commit"
        return "rubrics" if self.rubrics else "weights"


@dataclass(frozen=True, slots=True)
class _Base:
    """The grades that a regrade starts from: those of a run, or of another regrade of it."""

    run: RunRequested
    rollout: RolloutRef
    total_steps: int
    regrade: str | None = None
    own_weight: float = 1.0


class Regrades:
    """Requests regrades and finds them."""

    def __init__(
        self,
        log: EventStore,
        lookup: Lookup,
        workspaces: Workspaces,
        *,
        artifacts: Artifacts,
        network: NetworkPolicy = NO_NETWORK,
    ) -> None:
        self._log = log
        self._lookup = lookup
        self._workspaces = workspaces
        self._artifacts = artifacts
        self._network = network

    async def request(self, ref: str, wish: RegradeWish, *, cause: UUID) -> RegradeView:
        """Request the regrade of a run, or of the grades of another regrade (`regrade:ID`). The same
        cause gives the same regrade. Raises NotFound, InvalidConfig, and Conflict when the run is
        archived, the other regrade has not finished, or the cause was that of another request."""
        base = await self._find_base(ref)
        identity = short_id("regrade", str(cause))
        _check_wish(wish, base)
        config = (
            _config(base.run.config, wish) if wish.source in ("commit", "working tree") else None
        )
        workspace = await self._workspace(base, wish)
        rubrics = _rubrics(base.run.config, wish, workspace, self._network)
        await self._require_room(base.run, identity)
        algorithm = base.run.config.advanced.algorithm
        requested = RegradeRequested(
            regrade=identity,
            run=base.run.run,
            source=wish.source,
            rollout=base.rollout,
            base=base.regrade,
            base_weight=base.own_weight,
            config=config,
            workspace=workspace.id if workspace else None,
            commit=wish.tree or wish.grader,
            rubrics=rubrics,
            weights=dict(wish.weights),
            steps=wish.steps,
            share=wish.share,
            threshold=wish.threshold,
            compares_groups=algorithm in GROUPED and algorithm not in COMPARES_PARTS,
            gradients=wish.gradients,
            submitter=wish.submitter,
            requester=wish.requester,
        )
        events: list[Event] = [requested]
        if config is not None and workspace is not None:
            events.append(_commit_request(requested, config, workspace))
        [recorded, *_] = await self._log.append(events, cause=cause)
        if _wish_of(recorded.event) != _wish_of(requested):
            raise Conflict(KEY_USED)
        return await self.find_regrade(identity)

    async def find_regrade(self, identity: str) -> RegradeView:
        """The regrade with this id. Raises NotFound."""
        identity = identity.removeprefix(PREFIX)
        streams = (regrade_stream(identity), gradients_stream(identity))
        loaded = await self._log.load(dict.fromkeys(streams, 0))
        recorded = [one for stream in streams for one in loaded[stream]]
        if not recorded or not isinstance(recorded[0].event, RegradeRequested):
            raise _unknown(identity)
        request = recorded[0].event
        if is_confined():
            try:
                await self._lookup.run(request.run)
            except NotFound:
                raise _unknown(identity) from None
        return view_regrade(request, recorded[0].time, [one.event for one in recorded])

    async def find_grades(self, identity: str, run: str, group: str) -> Sequence[Grade]:
        """The new grades of a group of this run in a regrade; none if the regrade has not graded it.
        Raises NotFound when the run has no such regrade."""
        view = await self.find_regrade(identity)
        if view.run != run:
            raise _unknown(identity)
        step = GroupKey.parse(group).step
        for recorded in (await self._log.load({regrade_stream(view.id): 0}))[
            regrade_stream(view.id)
        ]:
            part = recorded.event
            if not isinstance(part, RegradePartGraded) or step not in part.by_step:
                continue
            data = await self._artifacts.get_artifact(part.artifact)
            for one in RegradedGroups.model_validate_json(data).groups:
                if one.group == group:
                    return one.after
        return ()

    async def list_regrades(self, ref: str) -> Sequence[RegradeView]:
        """The regrades of a run, the newest first. Raises NotFound, and Conflict when the run is
        archived."""
        run = (await self._lookup.whole_run(ref)).run
        types = [one.type for one in LISTED]
        cursor, found = Cursor(), dict[str, tuple[datetime, list[Event]]]()
        while page := await self._log.read(run, after=cursor, limit=MOST_REGRADES, types=types):
            for one in page:
                if isinstance(one.event, RegradeRequested):
                    found[one.event.regrade] = (one.time, [one.event])
                elif isinstance(one.event, LISTED) and one.event.regrade in found:
                    found[one.event.regrade][1].append(one.event)
            cursor = page[-1].cursor
        views = [
            view_regrade(events[0], at, events)
            for at, events in found.values()
            if isinstance(events[0], RegradeRequested)
        ]
        return sorted(views, key=lambda view: view.at, reverse=True)[:MOST_REGRADES]

    async def _require_room(self, run: RunRequested, identity: str) -> None:
        """Raises Conflict when as many regrades of a run work as may, and `identity` is none of them."""
        found = await self.list_regrades(run.run)
        working = [view.id for view in found if view.completed is None]
        if len(working) >= MOST_AT_ONCE and all(view.id != identity for view in found):
            raise Conflict(
                f"run {run.run_name} has {len(working)} regrades that have not ended; wait for one of "
                f"them, `headrace train regrades {run.run_name}` lists them"
            )

    async def _find_base(self, ref: str) -> _Base:
        """The run or the regrade that a reference names, with the rollout that made its grades."""
        if ref.startswith(PREFIX):
            return await self._find_base_regrade(ref.removeprefix(PREFIX))
        stream = regrade_stream(ref)
        if is_id(ref) and (await self._log.versions([stream]))[stream]:
            try:
                return await self._find_base_regrade(ref)
            except NotFound:
                pass  # one that the sender may not see answers like an id that names nothing
        run = await self._lookup.whole_run(ref)
        graded = await self._first(run.run, GroupGraded)
        if graded is None:
            raise Refused(
                f"run {run.run_name} has no graded groups to grade again; wait for its first step, or "
                "name a run that samples"
            )
        rollout = graded.spec.template.rollout
        if rollout is None:
            raise Refused(f"run {run.run_name} has no rollout, so nothing graded its samples")
        started = await self._first(run.run, RunStarted)
        return _Base(run, rollout, started.plan.total_steps if started else 0)

    async def _find_base_regrade(self, identity: str) -> _Base:
        view = await self.find_regrade(identity)
        if view.status != "finished":
            raise Conflict(
                f"regrade {identity} is {view.status}; grade again what has finished, or the run"
            )
        run = await self._find_base(view.run)
        loaded = (await self._log.load({regrade_stream(identity): 0}))[regrade_stream(identity)]
        started = next(r.event for r in loaded if isinstance(r.event, RegradeStarted))
        own = view.request.weights.get(GRADER_PART, view.request.base_weight)
        return _Base(run.run, started.rollout, run.total_steps, identity, own)

    async def _first(self, run: str, kind: type[E]) -> E | None:
        for recorded in await self._log.read(run, after=Cursor(), limit=1, types=[kind.type]):
            if isinstance(recorded.event, kind):
                return recorded.event
        return None

    async def _workspace(self, base: _Base, wish: RegradeWish) -> Workspace | None:
        """The workspace whose grader is used, or whose judges are asked. Raises Refused for a grader of
        a run that has none, and for a working tree that the server cannot read."""
        if wish.source == "weights":
            return None
        if base.run.workspace is None:
            raise Refused(f"run {base.run.run_name} has no workspace, so it has no other grader")
        workspace = await self._workspaces.find_workspace(base.run.workspace)
        if wish.tree is not None and not is_path(workspace.url):
            raise Refused(
                f"the server reads {workspace.name} from {workspace.url}, which does not have your "
                "working tree; commit the grader, push it, and name that commit with --grader"
            )
        return workspace


def _wish_of(event: Event) -> Mapping[str, object]:
    """The wish of the sender, as an event that requests a regrade has it."""
    return event.model_dump(include=ASKED)


def _unknown(identity: str) -> NotFound:
    return NotFound(
        f"there is no regrade {identity[:60]!r}; `headrace train regrades RUN` lists those of a run"
    )


def _invalid(key: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{key} {message}", issues=(Issue(key, message),))


def _check_wish(wish: RegradeWish, base: _Base) -> None:
    """Raises InvalidConfig or Refused when a request cannot be carried out."""
    if not (wish.grader or wish.tree or wish.rubrics or wish.weights):
        raise InvalidConfig(
            "nothing would be graded otherwise; name another grader (--grader), rubrics (--rubric) or "
            "weights (--reward NAME=WEIGHT)"
        )
    if wish.grader and wish.tree:
        raise _invalid("tree", "names a working tree beside a commit; give one of them")
    if wish.tree is not None and not TREE.fullmatch(wish.tree):
        raise _invalid("tree", f"must be a commit of 40 hex digits, got {wish.tree[:60]!r}")
    if wish.grader is not None and not SHA.fullmatch(wish.grader):
        _check_branch(wish.grader)
    if not 0 < wish.share <= 1:
        raise _invalid("share", f"must be above 0 and at most 1, got {wish.share:g}")
    if wish.steps is not None:
        _check_steps(wish.steps, base)
    names = part_names(base.rollout) if not wish.rubrics else _names_with(base.rollout, wish)
    if strange := [name for name in wish.weights if not PART.fullmatch(name)]:
        raise _invalid("weights", f"names {strange[0][:60]!r}, which is not the name of a part")
    unknown = [name for name in wish.weights if name not in names]
    if unknown and wish.source not in ("commit", "working tree"):
        has = ", ".join(names) or "none"
        raise _invalid("weights", f"names {', '.join(unknown)}; the parts of the reward are: {has}")
    if base.rollout.kind == "server" and wish.source != "weights":
        raise Refused(
            f"run {base.run.run_name} has a rollout server, which grades samples while it makes them; "
            "its recorded parts can only be weighed again (--reward NAME=WEIGHT)"
        )
    algorithm = base.run.config.advanced.algorithm
    if wish.gradients and algorithm not in REINFORCED:
        raise _invalid(
            "gradients", f"cannot be compared for {algorithm}, which does not learn from advantages"
        )


def _check_branch(name: str) -> None:
    """Raises InvalidConfig for what git cannot have as a branch. The event that requests a regrade
    would hold a config that nobody can read."""
    try:
        checked_branch(name)
    except InvalidConfig as error:
        message = f"must be a commit or a branch, got {name[:60]!r}"
        raise _invalid("grader", message) from error


def _names_with(rollout: RolloutRef, wish: RegradeWish) -> tuple[str, ...]:
    rubrics = {one.name for one in rollout.rubrics}
    others = [name for name in part_names(rollout) if name not in rubrics]
    return (*others, *(one.name or f"rubric_{n}" for n, one in enumerate(wish.rubrics, 1)))


def _check_steps(steps: tuple[int, int], base: _Base) -> None:
    first, last = steps
    most = base.total_steps
    if first < 1 or last < first or (most and last > most):
        raise _invalid(
            "steps", f"must be a range A..B within 1..{most} of the run, got {first}..{last}"
        )


def _config(config: RunConfig, wish: RegradeWish) -> RunConfig:
    """The config with which the grader of another commit is chosen: that of the run, with the reward
    functions and the rubrics that the request names."""
    advanced, experiment = config.advanced, config.experiment
    changes: dict[str, object] = {}
    if wish.rubrics:
        changes["rubrics"] = tuple(wish.rubrics)
    known = {one.name for one in rubric_specs(advanced)} | {GRADER_PART}
    known |= {one.name for one in advanced.rewards}
    known |= {one.name or f"rubric_{n}" for n, one in enumerate(wish.rubrics, 1)}
    known |= {one.name or f"reward_model_{n}" for n, one in enumerate(advanced.reward_models, 1)}
    added = [
        RewardWeight(name=name, weight=weight)
        for name, weight in wish.weights.items()
        if name not in known
    ]
    if added:
        changes["rewards"] = (*advanced.rewards, *added)
    is_sha = wish.tree is not None or (wish.grader and SHA.fullmatch(wish.grader))
    named = wish.tree or wish.grader
    pinned = (
        {"commit_sha": named, "branch": None} if is_sha else {"branch": named, "commit_sha": None}
    )
    return config.model_copy(
        update={
            "advanced": advanced.model_copy(update=changes),
            "experiment": experiment.model_copy(update=pinned),
        }
    )


def _rubrics(
    config: RunConfig, wish: RegradeWish, workspace: Workspace | None, network: NetworkPolicy
) -> tuple[RubricSpec, ...]:
    """The rubrics of a request. Raises InvalidConfig when a judge cannot be asked."""
    if not wish.rubrics:
        return ()
    advanced = config.advanced.model_copy(update={"rubrics": tuple(wish.rubrics)})
    specs = rubric_specs(advanced)
    names = [*(one.name for one in advanced.rewards), *(one.name for one in specs)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _invalid("rubrics", f"has a name that is used twice: {', '.join(twice)}; rename it")
    changed = config.model_copy(update={"advanced": advanced})
    wrong = [one for one in rubric_issues(changed) if one.key.startswith(RUBRICS_KEY)]
    if wrong:
        issue = replace(wrong[0], key=wrong[0].key.removeprefix("advanced."))
        raise InvalidConfig(f"{issue.key} {issue.message}", issues=(issue,))
    where = workspace.setting_name if workspace else ""
    judges = {f"rubrics[{number}]": one for number, one in enumerate(specs)}
    issues = tuple(judge_issues(judges, where, network.addresses_of(where)))
    if issues:
        raise InvalidConfig(f"{issues[0].key} {issues[0].message}", issues=issues)
    return specs


def _commit_request(
    requested: RegradeRequested, config: RunConfig, workspace: Workspace
) -> CommitRequested:
    """The event that makes sync fetch the commit. That of a working tree is on no branch; it is in a
    directory of this machine, which gives out all of its commits."""
    experiment = config.experiment
    spec = CommitSpec(
        url=workspace.url,
        branch=experiment.branch,
        sha=experiment.commit_sha,
        ref="refs/heads/working-tree" if requested.source == "working tree" else None,
    )
    entrypoint = Entrypoint(rollout=experiment.rollout or "", path=experiment.entrypoint or "")
    return CommitRequested(
        workspace=workspace.id,
        workspace_name=workspace.name,
        commit=spec,
        entrypoints=(entrypoint,),
        requester=requested.stream,
    )
