"""Brings commits of a workspace's repository in.
Reads: RepositoryPushed.  Emits: WorkspaceSynced, WorkspaceRejected.  Stream: workspace.
Does: fetches, stores a snapshot, discovers entry points (lane: control).  Waits for: nothing.
Safe to repeat because: one FetchCommit per push, and a push that was answered decides nothing.

A push is a hint: the ref is resolved when the effect runs, so a late delivery never moves a head
back. Repositories are hostile: nothing of a commit is checked out, and only its entry points are
run, confined.
"""

import asyncio
import io
import tarfile
from dataclasses import dataclass, replace
from typing import assert_never
from uuid import UUID

from consumers.excerpt import excerpt
from consumers.needs import need
from infra.consumer import NOTHING, Consumer, Decision, Message, Meta
from infra.ports import Ports
from schemas.errors import Refused
from schemas.events import RepositoryPushed, WorkspaceRejected, WorkspaceSynced
from schemas.ids import ConsumerName, StreamName
from schemas.messages import CommitFetched, Failed, FetchCommit
from schemas.specs import DiscoveredRollout, Entrypoint

ANSWERED_KEPT = 256
"""How many answered pushes are remembered; older ones lie below the watermark and are consumed."""

MAX_ENTRYPOINTS = 64
"""Entry points of one commit; what is found in them must fit into one event."""

WorkspaceEvent = RepositoryPushed | WorkspaceSynced | WorkspaceRejected


@dataclass(frozen=True, slots=True)
class WorkspaceState:
    """The pushes that were answered last, by event id."""

    answered: tuple[UUID, ...] = ()


def evolve(state: WorkspaceState, event: WorkspaceEvent) -> WorkspaceState:
    """Fold one event of a workspace stream."""
    match event:
        case RepositoryPushed():
            return state
        case WorkspaceSynced() | WorkspaceRejected():
            return replace(state, answered=(*state.answered, event.push)[-ANSWERED_KEPT:])
        case _:
            assert_never(event)


def handle(state: WorkspaceState, message: Message, meta: Meta) -> Decision:
    """A push asks for its commit; what came of it is the answer."""
    match message:
        case RepositoryPushed() if meta.event_id not in state.answered:
            fetch = FetchCommit(
                workspace=message.workspace,
                push=meta.event_id,
                commit=message.commit,
                entrypoints=message.entrypoints,
                requester=message.requester,
            )
            return Decision(effects=(fetch,))
        case CommitFetched(effect=effect) if effect.push not in state.answered:
            synced = WorkspaceSynced(
                workspace=effect.workspace,
                push=effect.push,
                commit=message.commit,
                snapshot=message.snapshot,
                rollouts=message.rollouts,
                requester=_requester(effect),
            )
            return Decision(events=(synced,))
        case Failed(effect=FetchCommit() as effect) if effect.push not in state.answered:
            rejected = WorkspaceRejected(
                workspace=effect.workspace,
                push=effect.push,
                message=excerpt(message.message),
                requester=_requester(effect),
            )
            return Decision(events=(rejected,))
        case _:
            return NOTHING


def _requester(effect: FetchCommit) -> StreamName | None:
    return StreamName(effect.requester) if effect.requester else None


def routes(message: Message) -> tuple[StreamName, ...]:
    """A push is decided on its own workspace's stream."""
    return (message.stream,) if isinstance(message, RepositoryPushed) else ()


async def perform(effect: FetchCommit, ports: Ports) -> CommitFetched:
    """Fetch, store, discover. Raises Refused when the commit or its tree cannot be used."""
    repositories = need(ports.repositories, "repositories")
    sha = await repositories.fetch(effect.workspace, effect.commit)
    tree = await repositories.snapshot(effect.workspace, sha)
    entrypoints = effect.entrypoints or await asyncio.to_thread(entrypoints_in, tree)
    snapshot = await ports.artifacts.put(tree, run=effect.workspace, blob=True)
    rollouts = await need(ports.user, "sandbox").discover(tree, entrypoints)
    return CommitFetched(
        effect=effect,
        commit=sha,
        snapshot=snapshot,
        rollouts=tuple(_presentable(rollout, len(rollouts)) for rollout in rollouts),
    )


def entrypoints_in(tree: bytes) -> tuple[Entrypoint, ...]:
    """Every `rollouts/<name>/main.py` of a snapshot, by name. Raises Refused when they are many."""
    with tarfile.open(fileobj=io.BytesIO(tree)) as tar:
        paths = [member.name.split("/") for member in tar if member.isfile()]
    names = sorted(p[1] for p in paths if len(p) == 3 and p[0] == "rollouts" and p[2] == "main.py")
    if len(names) > MAX_ENTRYPOINTS:
        raise Refused(
            f"the commit has {len(names)} rollouts, more than {MAX_ENTRYPOINTS}; name the entry "
            "point in the run's TOML, or split the workspace"
        )
    return tuple(Entrypoint(rollout=name) for name in names)


def _presentable(rollout: DiscoveredRollout, num_rollouts: int) -> DiscoveredRollout:
    if rollout.error is None:
        return rollout
    return rollout.model_copy(update={"error": excerpt(rollout.error, num_samples=num_rollouts)})


CONSUMER = Consumer(
    name=ConsumerName("sync"),
    category="workspace",
    reads=(RepositoryPushed,),
    emits=(WorkspaceSynced, WorkspaceRejected),
    effects=(FetchCommit,),
    initial=WorkspaceState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
)
