"""Events of triggers: the runs that a push starts, and their statuses on the commit."""

from typing import ClassVar

from schemas.events.event import WORKSPACE_TOPIC, Event
from schemas.events.workspaces import BaseWorkspaceEvent
from schemas.ids import StreamName, status_stream, trigger_stream
from schemas.specs import CommitStatus, Push, PushOrigin, TriggerMatch


class _TriggerEvent(BaseWorkspaceEvent):
    @property
    def stream(self) -> StreamName:
        return trigger_stream(self.workspace)


class PushExamined(_TriggerEvent):
    """The `headrace.toml` of a pushed commit was read. `matches` are the triggers that the push
    matched. Without matches, `reason` says why no run follows, or `error` what is wrong with the commit
    or its `headrace.toml`. `day` is the day of the examination, for `max_runs_per_day`."""

    type: ClassVar[str] = "rl.trigger.push-examined"
    push: Push
    matches: tuple[TriggerMatch, ...] = ()
    reason: str | None = None
    error: str | None = None
    day: str

    @property
    def name(self) -> str:
        return f"{self.type}/{self.push.number}"


class _TriggeredEvent(_TriggerEvent):
    """An event about one run of one trigger. `run` is the id that the run has, or would have."""

    run: str
    origin: PushOrigin

    @property
    def name(self) -> str:
        return f"{self.type}/{self.run}"


class TriggerQueued(_TriggeredEvent):
    """The run waits until the run `behind` of the same trigger has ended."""

    type: ClassVar[str] = "rl.trigger.queued"
    behind: str


class TriggerSkipped(_TriggeredEvent):
    """The push matched the trigger, and no run follows, for example because one is running already."""

    type: ClassVar[str] = "rl.trigger.skipped"
    reason: str


class TriggerFired(_TriggeredEvent):
    """The run is to be submitted now. The runs in `supersedes` are to be stopped."""

    type: ClassVar[str] = "rl.trigger.fired"
    supersedes: tuple[str, ...] = ()


class TriggerSubmitted(_TriggeredEvent):
    """The run was submitted."""

    type: ClassVar[str] = "rl.trigger.submitted"
    run_name: str


class TriggerRefused(_TriggeredEvent):
    """The run was refused, for example because its config is not valid. `message` says what to do."""

    type: ClassVar[str] = "rl.trigger.refused"
    message: str


class TriggerSettled(_TriggeredEvent):
    """The run of a trigger has ended, so that the next one in its queue may be submitted."""

    type: ClassVar[str] = "rl.trigger.settled"


class _StatusEvent(Event):
    """An event about the commit status of a run, or of a push that made no run (`subject`). `number`
    counts the statuses of one subject, from 1."""

    topic: ClassVar[str] = WORKSPACE_TOPIC
    workspace: str
    subject: str
    number: int

    @property
    def stream(self) -> StreamName:
        return status_stream(self.subject)

    @property
    def run_id(self) -> str:
        return self.workspace

    @property
    def name(self) -> str:
        return f"{self.type}/{self.number}"


class CommitStatusDecided(_StatusEvent):
    """The commit is to show this status. A status that was not posted yet is replaced by it. `stage`
    orders the statuses of a run: 1 queued, 2 submitted, 3 ended."""

    type: ClassVar[str] = "rl.status.decided"
    stage: int
    status: CommitStatus


class CommitStatusPosted(_StatusEvent):
    """The forge shows the status. `skipped` means that it was not posted, because the workspace is not
    connected, or has no token that may post; `error` is why the forge refused it."""

    type: ClassVar[str] = "rl.status.posted"
    skipped: bool = False
    error: str | None = None
