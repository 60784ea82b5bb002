"""Events of pushes: what a forge delivers, and where the refs of a repository are."""

from typing import ClassVar, Literal

from schemas.events.workspaces import BaseWorkspaceEvent, ForgeKind
from schemas.ids import StreamName, delivery_stream
from schemas.specs import Push, RefMove


class _DeliveryEvent(BaseWorkspaceEvent):
    @property
    def stream(self) -> StreamName:
        return delivery_stream(self.workspace)


class PushReceived(_DeliveryEvent):
    """The forge delivered a signed webhook about a push. The event is only a hint: sync asks the
    repository itself where its refs are. `delivery` is the forge's id of the delivery. `before` is
    None for a new ref, and `after` for a deleted one."""

    type: ClassVar[str] = "rl.workspace.push-received"
    version: ClassVar[int] = 2
    forge: ForgeKind
    delivery: str
    ref: str
    before: str | None
    after: str | None
    forced: bool = False
    pusher: str | None = None


class HookPinged(_DeliveryEvent):
    """The forge tried its webhook for the first time, and the signature was right."""

    type: ClassVar[str] = "rl.workspace.hook-pinged"
    version: ClassVar[int] = 2
    forge: ForgeKind
    delivery: str


class RefsCheckRequested(_DeliveryEvent):
    """The repository's refs should be listed: a poll found them changed, a person asked for it, or the
    workspace was connected. With `baseline` its refs are only remembered, and start no run."""

    type: ClassVar[str] = "rl.workspace.refs-check-requested"
    reason: Literal["poll", "manual", "connected"]
    baseline: bool = False


class RefsRequested(BaseWorkspaceEvent):
    """Sync asks the repository for its refs. While one listing is under way, at most one more is
    requested, whatever arrives. So many hints cost few listings, and the last hint is never missed."""

    type: ClassVar[str] = "rl.workspace.refs-requested"
    round: int
    baseline: bool = False

    @property
    def name(self) -> str:
        return f"{self.type}/{self.round}"


class RefsMoved(BaseWorkspaceEvent):
    """Refs of the repository moved since the last listing. `baseline` means that they are only
    remembered. `part` counts the events of one listing, because one event holds at most 100 moves."""

    type: ClassVar[str] = "rl.workspace.refs-moved"
    workspace_name: str
    url: str
    round: int
    part: int = 0
    moves: tuple[RefMove, ...]
    baseline: bool = False

    @property
    def name(self) -> str:
        return f"{self.type}/{self.round}/{self.part}"

    def pushes(self) -> tuple[Push, ...]:
        """The moves that triggers decide on: refs that exist, and not those of a baseline."""
        if self.baseline:
            return ()
        return tuple(
            Push(
                workspace=self.workspace,
                workspace_name=self.workspace_name,
                url=self.url,
                number=move.number,
                ref=move.ref,
                before=move.before,
                after=move.after,
            )
            for move in self.moves
            if move.after is not None
        )


class RefsListed(BaseWorkspaceEvent):
    """The repository was asked for its refs, and what moved is recorded. `digest` identifies the whole
    listing. `error` says why the refs could not be listed."""

    type: ClassVar[str] = "rl.workspace.refs-listed"
    round: int
    digest: str | None = None
    num_refs: int = 0
    default_branch: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.type}/{self.round}"
