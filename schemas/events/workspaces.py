"""Events of a workspace: its commits are fetched, and it is connected to its forge."""

from typing import ClassVar, Literal
from uuid import UUID

from schemas.artifact_refs import ArtifactRef
from schemas.events.event import WORKSPACE_TOPIC, Event
from schemas.ids import StreamName, workspace_stream
from schemas.specs import CommitSpec, DiscoveredRollout, Entrypoint

ForgeKind = Literal["github", "gitea", "gitlab", "none"]
"""The kind of forge that holds a repository. `none`: a repository without a forge, which posts signed
webhooks in GitHub's form, or is only polled."""


class BaseWorkspaceEvent(Event):
    """An event of a workspace."""

    topic: ClassVar[str] = WORKSPACE_TOPIC
    workspace: str

    @property
    def stream(self) -> StreamName:
        return workspace_stream(self.workspace)

    @property
    def run_id(self) -> str:
        return self.workspace


class CommitRequested(BaseWorkspaceEvent):
    """A commit of a repository should be fetched, because a workspace was added, or a run needs it. The
    event is only a hint: sync resolves the branch or commit when it runs. `requester` is the stream that
    waits for the result, if there is one."""

    type: ClassVar[str] = "rl.workspace.commit-requested"
    old_type: ClassVar[str | None] = "rl.workspace.pushed"
    workspace_name: str
    commit: CommitSpec
    entrypoints: tuple[Entrypoint, ...] = ()
    requester: StreamName | None = None


class PackagesChosen(BaseWorkspaceEvent):
    """The exact packages of rollouts of a commit were chosen. They are installed next. `rollouts` are
    those that have packages."""

    type: ClassVar[str] = "rl.workspace.packages-chosen"
    version: ClassVar[int] = 2
    request: UUID
    commit: str
    rollouts: tuple[DiscoveredRollout, ...]
    requester: StreamName | None = None


class WorkspaceSynced(BaseWorkspaceEvent):
    """A commit was fetched, its snapshot was stored, and its entry points were examined."""

    type: ClassVar[str] = "rl.workspace.synced"
    version: ClassVar[int] = 2
    request: UUID
    commit: str
    snapshot: ArtifactRef
    rollouts: tuple[DiscoveredRollout, ...]
    requester: StreamName | None = None


class WorkspaceRejected(BaseWorkspaceEvent):
    """A commit could not be fetched, or its files cannot be used. `message` says what to do."""

    type: ClassVar[str] = "rl.workspace.rejected"
    version: ClassVar[int] = 2
    request: UUID
    message: str
    requester: StreamName | None = None


class WorkspaceConnected(BaseWorkspaceEvent):
    """A person connected the repository to its forge: pushes are followed from here on. The secrets
    are in the table `connections` and never in an event. `hook` is the id of the webhook that was made
    through the forge's API. `can_post` says whether commit statuses can be posted."""

    type: ClassVar[str] = "rl.workspace.connected"
    version: ClassVar[int] = 2
    forge: ForgeKind
    hook: str | None = None
    can_post: bool = False


class WorkspaceDisconnected(BaseWorkspaceEvent):
    """A person disconnected the repository from its forge: pushes are not followed any more."""

    type: ClassVar[str] = "rl.workspace.disconnected"
