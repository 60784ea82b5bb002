"""Fetches commits of a workspace's repository, and follows its refs.
Reads: CommitRequested, PushReceived, RefsCheckRequested.  Emits: PackagesChosen, WorkspaceSynced,
WorkspaceRejected, RefsRequested, RefsMoved, RefsListed.  Stream: workspace.
Does: fetches, stores a snapshot, discovers entry points, lists refs (lane: control).
Waits for: nothing.
Safe to repeat because: one FetchCommit and one DiscoverRollouts per request, one ListRefs per round, and
an answer counts once.

A request is only a hint. The ref is resolved when the effect runs, so a late delivery never moves a head
back. `refs.py` holds how hints lead to listings, and listings to moves. Repositories are not trusted. No
commit is checked out, and only its entry points run, in a sandbox.

The request of a run examines only the run's own entry point, so that the run does not wait for other
rollouts. If the run followed the default branch to a new commit, the workspace makes a request of its
own, which finds all rollouts there. It does the same when a push moved the default branch.

If rollouts have packages, their exact versions are recorded before they are installed. So the log shows
what is being installed, and a sync that is repeated installs the same.
"""

from dataclasses import dataclass, field, replace
from typing import assert_never
from uuid import UUID

from consumers.sync import snapshot as snapshot_of
from consumers.sync.discovery import choose_packages, examine_rollouts
from consumers.sync.refs import (
    FollowedRefs,
    RefsEvent,
    fold_refs,
    pushed_commit,
    record_failure,
    record_listing,
    request_listing,
)
from infra.ports.services import Repositories, UserCode
from infra.spine.ports.artifacts import Artifacts
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.effects import (
    CommitFetched,
    DiscoverRollouts,
    Failed,
    FetchCommit,
    ListRefs,
    RefListing,
    RolloutsDiscovered,
)
from schemas.events import (
    CommitRequested,
    PackagesChosen,
    PushReceived,
    RefsCheckRequested,
    RefsListed,
    RefsMoved,
    RefsRequested,
    WorkspaceConnected,
    WorkspaceDisconnected,
    WorkspaceRejected,
    WorkspaceSynced,
)
from schemas.ids import HEADRACE, ConsumerName, StreamName, derive_id, workspace_stream
from schemas.specs import CommitSpec, DiscoveredRollout

ANSWERED_KEPT = 256
"""How many answered requests are remembered; older ones lie below the watermark and are consumed."""

LONGEST_ERROR = 1500
"""Bytes of the error of one rollout that are recorded. What a resolver says takes several lines."""

ROOM_BYTES = 24 << 10
"""Bytes that the definitions of all entry points of a commit may take in an event, as JSON."""

NOT_DEFINED = {"entrypoint", "kind", "environment", "error"}
"""The fields of a rollout that its code does not define."""

WorkspaceEvent = CommitRequested | PackagesChosen | WorkspaceSynced | WorkspaceRejected | RefsEvent
WorkspaceMessage = (
    CommitRequested
    | PushReceived
    | RefsCheckRequested
    | CommitFetched
    | RolloutsDiscovered
    | RefListing
    | Failed
)
WorkspaceEffect = FetchCommit | DiscoverRollouts | ListRefs


@dataclass(frozen=True, slots=True)
class WorkspaceState:
    """The ids of the requests of commits that were answered last. `looked` is the last request that did
    not come from a run, and `commit` is the commit that it found. `refs` are the branches and tags."""

    answered: tuple[UUID, ...] = ()
    looked: UUID | None = None
    commit: str | None = None
    refs: FollowedRefs = field(default_factory=FollowedRefs)


def evolve(state: WorkspaceState, event: WorkspaceEvent) -> WorkspaceState:
    """Return the state after one event of a workspace stream."""
    match event:
        case CommitRequested():
            refs = replace(state.refs, name=event.workspace_name, url=event.commit.url)
            return replace(state, refs=refs)
        case WorkspaceSynced() | WorkspaceRejected():
            new = replace(state, answered=(*state.answered, event.request)[-ANSWERED_KEPT:])
            if isinstance(event, WorkspaceRejected) or event.requester is not None:
                return new
            return replace(new, looked=event.request, commit=event.commit)
        case PackagesChosen():
            return state
        case (
            RefsRequested()
            | RefsMoved()
            | RefsListed()
            | WorkspaceConnected()
            | WorkspaceDisconnected()
        ):
            return replace(state, refs=fold_refs(state.refs, event))
        case _:
            assert_never(event)


def handle(state: WorkspaceState, message: WorkspaceMessage, meta: Meta) -> Decision:
    """Fetch the commit of a request, or list the refs after a hint, and record the answers."""
    match message:
        case PushReceived():
            return request_listing(state.refs, message.workspace, baseline=False)
        case RefsCheckRequested():
            return request_listing(state.refs, message.workspace, baseline=message.baseline)
        case RefListing():
            return _record_listing(state, message)
        case Failed(effect=ListRefs() as listing):
            return record_failure(state.refs, listing, excerpt(message.message))
        case CommitRequested() if meta.event_id not in state.answered:
            fetch = FetchCommit(
                workspace=message.workspace,
                request=meta.event_id,
                commit=message.commit,
                entrypoints=message.entrypoints,
                requester=message.requester,
            )
            return Decision(effects=(fetch,))
        case CommitFetched(effect=effect) if effect.request not in state.answered:
            if message.needs_packages:
                return _install_packages(message)
            return _answer(state, effect, message.commit, message.snapshot, message.rollouts)
        case RolloutsDiscovered(effect=effect) if effect.request not in state.answered:
            return _answer(state, effect, effect.sha, effect.snapshot, message.rollouts)
        case Failed(effect=FetchCommit() | DiscoverRollouts() as effect) if (
            effect.request not in state.answered
        ):
            rejected = WorkspaceRejected(
                workspace=effect.workspace,
                request=effect.request,
                message=excerpt(message.message),
                requester=_requester(effect),
            )
            return Decision(events=(rejected,))
        case _:
            return NOTHING


def _record_listing(state: WorkspaceState, listing: RefListing) -> Decision:
    """Record how the refs moved. If a push moved the default branch, the workspace fetches it."""
    decision = record_listing(state.refs, listing)
    move = pushed_commit(decision, listing.default_branch)
    if move is None:
        return decision
    workspace = listing.effect.workspace
    request = derive_id(HEADRACE, f"moved/{workspace}/{move.number}")
    spec = CommitSpec(url=listing.effect.url)
    look = FetchCommit(workspace=workspace, request=request, commit=spec, entrypoints=())
    return replace(decision, effects=(*decision.effects, look))


def _install_packages(fetched: CommitFetched) -> Decision:
    """Record the packages that were chosen, and request the rest of the sync."""
    effect = fetched.effect
    chosen = PackagesChosen(
        workspace=effect.workspace,
        request=effect.request,
        commit=fetched.commit,
        rollouts=tuple(one for one in fetched.rollouts if one.environment is not None),
        requester=_requester(effect),
    )
    discover = DiscoverRollouts(
        workspace=effect.workspace,
        request=effect.request,
        commit=effect.commit,
        requester=effect.requester,
        sha=fetched.commit,
        snapshot=fetched.snapshot,
        rollouts=fetched.rollouts,
    )
    return Decision(events=(chosen,), effects=(discover,))


def _answer(
    state: WorkspaceState,
    effect: FetchCommit | DiscoverRollouts,
    commit: str,
    snapshot: ArtifactRef,
    rollouts: tuple[DiscoveredRollout, ...],
) -> Decision:
    synced = WorkspaceSynced(
        workspace=effect.workspace,
        request=effect.request,
        commit=commit,
        snapshot=snapshot,
        rollouts=rollouts,
        requester=_requester(effect),
    )
    return Decision(events=(synced,), effects=_look(state, effect, commit))


def _look(
    state: WorkspaceState, effect: FetchCommit | DiscoverRollouts, commit: str
) -> tuple[FetchCommit, ...]:
    """Return the workspace's own fetch of a commit that a run was the first to see. Several runs that
    see the same commit cause only one fetch."""
    spec = effect.commit
    followed = effect.requester is not None and spec.sha is None and spec.branch is None
    if not followed or state.looked is None or state.commit == commit:
        return ()
    request = derive_id(state.looked, f"look/{commit}")
    look = FetchCommit(
        workspace=effect.workspace, request=request, commit=CommitSpec(url=spec.url), entrypoints=()
    )
    return () if request in state.answered else (look,)


def _requester(effect: FetchCommit | DiscoverRollouts) -> StreamName | None:
    return StreamName(effect.requester) if effect.requester else None


def routes(message: WorkspaceMessage) -> tuple[StreamName, ...]:
    """Return the stream of the workspace whose repository the message is about."""
    match message:
        case CommitRequested() | PushReceived() | RefsCheckRequested():
            return (workspace_stream(message.workspace),)
        case _:
            return ()


@dataclass(frozen=True, slots=True)
class SyncPorts:
    """The mirrors of repositories, and the sandbox that looks for rollouts in their commits."""

    repositories: Repositories
    user: UserCode
    artifacts: Artifacts


async def perform(
    effect: WorkspaceEffect, ports: SyncPorts
) -> CommitFetched | RolloutsDiscovered | RefListing:
    """List the refs of a repository, fetch one of its commits, or examine its rollouts. Raises Refused
    when the repository or the commit cannot be used."""
    match effect:
        case ListRefs():
            found = await ports.repositories.list_refs(effect.workspace, effect.url)
            return RefListing(
                effect=effect,
                refs=found.refs,
                digest=found.digest,
                default_branch=found.default_branch,
            )
        case FetchCommit():
            return await perform_fetch(effect, ports)
        case DiscoverRollouts():
            tree = await ports.artifacts.get_artifact(effect.snapshot)
            rollouts = await examine_rollouts(tree, effect.rollouts, user=ports.user)
            return RolloutsDiscovered(effect=effect, rollouts=_presentable(rollouts))
        case _:
            assert_never(effect)


async def perform_fetch(effect: FetchCommit, ports: SyncPorts) -> CommitFetched:
    """Fetch the commit, store its snapshot, and choose the packages of its rollouts. If they need none,
    discover its entry points too. Raises Refused when the commit or its tree cannot be used."""
    repositories = ports.repositories
    sha = await repositories.fetch(effect.workspace, effect.commit)
    tree = await repositories.snapshot(effect.workspace, sha)
    entrypoints = effect.entrypoints or await snapshot_of.find_entrypoints(tree)
    sha256 = await snapshot_of.hash_snapshot(tree)
    snapshot = await ports.artifacts.put_artifact(
        tree, run=effect.workspace, blob=True, sha256=sha256
    )
    user = ports.user
    found = await choose_packages(
        tree, entrypoints, user=user, artifacts=ports.artifacts, owner=effect.workspace
    )
    needs_packages = any(one.environment and one.environment.packages for one in found)
    if not needs_packages:
        found = await examine_rollouts(tree, found, user=user)
    return CommitFetched(
        effect=effect,
        commit=sha,
        snapshot=snapshot,
        rollouts=_presentable(found),
        needs_packages=needs_packages,
    )


def _presentable(found: tuple[DiscoveredRollout, ...]) -> tuple[DiscoveredRollout, ...]:
    """The rollouts with what fits into one event: the parts of their errors, and the definitions of as
    many as possible, in order. Those whose definitions do not fit have an error that says so."""
    shown = []
    room = ROOM_BYTES
    for one in found:
        taken = len(one.model_dump_json(exclude=NOT_DEFINED).encode())
        room -= taken
        error = one.error
        if room < 0:
            room += taken
            one = DiscoveredRollout(entrypoint=one.entrypoint, environment=one.environment)
            error = (  # short, because 64 errors have to fit too
                f"its rubrics and names take {taken} of {ROOM_BYTES} bytes of a commit; shorten them"
            )
        error = error and excerpt(error, num_samples=len(found), longest=LONGEST_ERROR)
        shown.append(one.model_copy(update={"error": error}))
    return tuple(shown)


CONSUMER: Consumer[WorkspaceState, WorkspaceEvent, WorkspaceMessage, WorkspaceEffect, SyncPorts] = (
    Consumer(
        name=ConsumerName("sync"),
        category="workspace",
        reads=(CommitRequested, PushReceived, RefsCheckRequested),
        emits=(
            PackagesChosen,
            WorkspaceSynced,
            WorkspaceRejected,
            RefsRequested,
            RefsMoved,
            RefsListed,
        ),
        effects=(FetchCommit, DiscoverRollouts, ListRefs),
        initial=WorkspaceState(),
        evolve=evolve,
        handle=handle,
        routes=routes,
        perform=perform,
        ports=SyncPorts,
        fold_version=3,
        snapshots=WorkspaceState,
    )
)
