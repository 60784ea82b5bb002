"""The first version of a fork must be the one that its parent's log names at the place of the fork."""

from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID, uuid4

from consumers.verify.audit import AuditPorts, AuditReport, LogContents, _load_base
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.memory import MemoryBlobs
from infra.spine.memory.event_log import MemoryLog, World
from schemas.events import PolicyInitialized, PolicyUpdated
from schemas.learner import LearnerJob, LearnerState
from schemas.models.fork import ForkedPolicy, ForkPoint
from schemas.specs import StateRef
from tests.kit.specs import MODEL, config, train_spec

POINT = ForkPoint(parent="p", step=1, position=9, policy_position=2)


@dataclass
class LoadingLearner:
    """Remembers what it was told to load."""

    loaded: list[LearnerState] = field(default_factory=list)

    async def load(self, job: LearnerJob, state: LearnerState) -> None:
        self.loaded.append(state)


async def found(*, theirs: str, ours: str, asked: ForkPoint = POINT) -> tuple[bool, list[str], int]:
    """Whether the base of a fork is accepted, the findings, and how many versions were loaded. The log
    of the parent names the weights `theirs`, and the fork begins with `ours`."""
    log = MemoryLog(World())
    artifacts, learner = ArtifactStore(log, MemoryBlobs()), LoadingLearner()
    blob = await artifacts.put_artifact(b"bytes", run="c", blob=True)

    def state(weights: str, step: int) -> StateRef:
        return StateRef(
            step=step, weights_sha256=weights * 64, state_sha256="5" * 64, weights=blob, state=blob
        )

    spec = train_spec()
    begin = PolicyInitialized(run="p", spec=spec, state=state("0", 0), versions={})
    updated = PolicyUpdated(
        run="p", step=1, state=state(theirs, 1), batch=UUID(int=1), metrics={}, plan=(), versions={}
    )
    for event in (begin, updated):
        await log.append([event], cause=uuid4())
    fork = ForkedPolicy(point=POINT, taken=1)
    first = PolicyInitialized(run="c", spec=spec, state=state(ours, 1), versions={}, fork=fork)
    report, contents = AuditReport(), LogContents(fork=asked, seen={blob.uri: True})
    ports = AuditPorts(
        log=log,
        artifacts=cast("Any", artifacts),
        datasets=cast("Any", None),
        learner=cast("Any", learner),
        blobs=cast("Any", None),
    )
    job = LearnerJob(run="alias", config=config(), model=MODEL, total_steps=3)
    accepted = await _load_base(first, fork, contents, report, ports, job)
    return accepted, [one.message for one in report.findings], len(learner.loaded)


async def test_the_parents_version_is_where_a_fork_is_rebuilt_from() -> None:
    assert await found(theirs="a", ours="a") == (True, [], 1)


async def test_another_version_than_the_parents_is_a_finding() -> None:
    accepted, messages, loaded = await found(theirs="a", ours="b")
    assert (accepted, loaded) == (False, 0)
    told = f"begins with {'b' * 16}, not with the version {'a' * 16} of its parent at step 1"
    assert messages == [told]


async def test_a_policy_that_begins_elsewhere_than_it_was_requested_is_a_finding() -> None:
    other = POINT.model_copy(update={"step": 2})
    _, messages, _ = await found(theirs="a", ours="a", asked=other)
    assert messages == ["the policy begins at another place than the run was requested for"]
