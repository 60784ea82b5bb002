"""Audits a run: checks that all artifacts of its log exist, and that its versions follow from the log.

1. The log: each stream has no gap, each event decodes, and each artifact has its recorded size and hash.
2. The batches: each group that was trained on is the one that was graded.
3. The versions: each is built again from version 0 (of a fork, from its parent's version, which it
   must equal), batch by batch, and must give the hashes that the log holds. The code is the one that
   recovery uses (`consumers/learn/replay.py`). No sampler and no grader runs.
4. The checkpoints: each manifest must equal the one that is computed again from its step.

Each difference becomes a finding that names the event, the artifact or the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import UUID

from consumers.checkpoint import manifest_json
from consumers.learn.replay import (
    HistoryPorts,
    build_step_batch,
    first_number,
    job_of,
    load_state,
)
from consumers.run.settle import settle
from consumers.verify.tensor_files import differing_tensors
from infra.ports.services import Blobs
from infra.spine.ports.event_log import Cursor, Recorded
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, HeadraceError, NotFound, Refused
from schemas.events import (
    BatchAssembled,
    CheckpointSaved,
    Event,
    GroupGraded,
    PolicyInitialized,
    PolicyUpdated,
    RunArchived,
    RunDeleted,
    RunRequested,
    RunStarted,
)
from schemas.events.artifact_refs import collectable, references
from schemas.ids import StreamName, checkpoint_stream, policy_stream, run_stream
from schemas.learner import Learner, LearnerJob, LearnerState, StepResult
from schemas.models.fork import ForkedPolicy, ForkPoint
from schemas.specs import BatchGroup, Finding, StateRef, part_weights

PAGE = 256
MOST_FINDINGS = 20
"""Findings after this many would add nothing new."""

Version = PolicyInitialized | PolicyUpdated


@dataclass
class AuditReport:
    """The result of an audit: counts of compared items, and the differences. `adapter_sha256` is the
    SHA-256 of the last rebuilt file of weights."""

    findings: list[Finding] = field(default_factory=list)
    steps: int = 0
    checkpoints: int = 0
    artifacts: int = 0
    adapter_sha256: str | None = None
    forks: list[int] = field(default_factory=list)
    """the steps that started from other bits than those of the log (`advanced.allow_divergence`)"""

    def add(
        self,
        kind: Literal["event", "artifact"],
        what: str,
        message: str,
        differs: "range | None" = None,
    ) -> None:
        """Add a finding."""
        if len(self.findings) < MOST_FINDINGS:
            first, last = (differs.start, differs.stop - 1) if differs else (None, None)
            self.findings.append(
                Finding(kind=kind, what=what, message=message, first_byte=first, last_byte=last)
            )


@dataclass
class LogContents:
    """The parts of the log that later checks of the audit need."""

    versions: list[Version] = field(default_factory=list)
    batches: dict[UUID, BatchAssembled] = field(default_factory=dict)
    graded: dict[tuple[int, int, int], BatchGroup] = field(default_factory=dict)
    saved: list[CheckpointSaved] = field(default_factory=list)
    compared_parts: tuple[str, ...] = ()
    fork: ForkPoint | None = None
    heads: dict[StreamName, int] = field(default_factory=dict)
    seen: dict[str, bool] = field(default_factory=dict)
    """Artifacts by uri: whether they are what was recorded."""


@dataclass(frozen=True, slots=True)
class AuditPorts(HistoryPorts):
    """The learner, and what a run has recorded and stored."""

    learner: Learner
    blobs: Blobs


async def audit(ports: AuditPorts, run: str, *, alias: str) -> AuditReport:
    """Audit a run and return the report. The learner builds the run's versions under the name `alias`,
    because the run itself may be training in the same learner. Raises TransientError, and Refused when
    the run's model cannot be loaded."""
    report, log = AuditReport(), LogContents()
    cursor = Cursor()
    while page := await ports.log.read(run, after=cursor, limit=PAGE):
        for recorded in page:
            await _check_event(recorded, log, report, ports)
        cursor = page[-1].cursor
    await _rebuild_versions(ports, log, report, alias=alias)
    for saved in log.saved:
        await _check_manifest(saved, log, report, ports)
    return report


async def _check_event(
    recorded: Recorded, log: LogContents, report: AuditReport, ports: AuditPorts
) -> None:
    """Check one event of the log: its place, its payload and its artifacts."""
    name = f"{recorded.stream}/{recorded.version}"
    head = log.heads.get(recorded.stream, 0)
    if recorded.version != head + 1:
        report.add("event", name, f"follows version {head} of its stream: events are missing")
    log.heads[recorded.stream] = recorded.version
    try:
        event = recorded.event
    except HeadraceError as error:
        report.add("event", name, f"{recorded.type} cannot be decoded: {error}")
        return
    match event:
        case RunRequested():
            log.fork = event.fork
        case RunStarted():
            log.compared_parts = tuple(part_weights(event.spec.config.advanced))
        case PolicyInitialized() | PolicyUpdated():
            log.versions.append(event)
        case BatchAssembled():
            log.batches[UUID(str(recorded.id))] = event
            _check_batch(event, name, log, report)
        case GroupGraded():
            key = event.spec.group_key
            log.graded[key.step, key.slot, key.replacement] = settle(
                event, compared_parts=log.compared_parts
            ).group
        case CheckpointSaved():
            log.saved.append(event)
        case RunArchived() | RunDeleted():
            raise Refused(f"run {event.run} was archived or deleted; its history is not in the log")
    await _check_artifacts(event, name, log, report, ports)


async def _check_artifacts(
    event: Event, name: str, log: LogContents, report: AuditReport, ports: AuditPorts
) -> None:
    spare = collectable(event)
    for ref in references(event):
        if ref.uri in log.seen:
            continue
        try:
            await ports.artifacts.get_artifact(ref, cached=False)
        except NotFound as error:
            if ref.uri not in spare:
                log.seen[ref.uri] = False
                report.add("artifact", ref.uri, f"{error} ({name} names it)")
            continue
        except CorruptData as error:
            log.seen[ref.uri] = False
            report.add("artifact", ref.uri, f"{error} ({name} names it)")
            continue
        log.seen[ref.uri] = True
        report.artifacts += 1


def _check_batch(event: BatchAssembled, name: str, log: LogContents, report: AuditReport) -> None:
    """Check that each group of a batch is the one that was graded, with its rewards."""
    for group in event.groups:
        graded = log.graded.get((event.step, group.slot, group.replacement))
        if graded != group:
            what = "was never graded" if graded is None else "was graded otherwise"
            report.add("event", name, f"group {group.slot} of step {event.step} {what}")


async def _rebuild_versions(
    ports: AuditPorts, log: LogContents, report: AuditReport, *, alias: str
) -> None:
    """Rebuild all versions from the first. When one differs, no later version can match, except from the
    next fork on, which was stored whole. In a run with forks, versions of another machine are not
    rebuilt here, which is not a finding: their bits were other ones there."""
    if not log.versions:
        return
    first, *updates = log.versions
    if not isinstance(first, PolicyInitialized):
        report.add("event", f"policy-{first.run}/1", "the run's version 0 is not in the log")
        return
    job = replace(job_of(first.spec), run=alias)
    has_forks = any(isinstance(update, PolicyUpdated) and update.fork for update in updates)
    if first.fork is not None:
        matches = await _load_base(first, first.fork, log, report, ports, job)
    else:
        result = await ports.learner.initialize(job)
        matches = await _matches_log(result, first, log, report, ports, has_forks=has_forks)
    for number, update in enumerate(updates, start=first_number(first) + 1):
        if not isinstance(update, PolicyUpdated):
            report.add("event", f"policy-{first.run}", "the log holds version 0 twice")
            return
        if update.fork is not None:
            report.forks.append(update.step)
            if not first.spec.config.advanced.allow_divergence:
                name = f"policy-{first.run} step {update.step}"
                report.add(
                    "event", name, "diverges from the log, which the run's config does not allow"
                )
            refs = (update.state.weights, update.state.state)
            matches = all(ref is not None and log.seen.get(ref.uri) for ref in refs)
            if matches:
                await ports.learner.load(job, await load_state(ports, update.state, number))
            continue
        if not matches:
            continue
        batch = log.batches.get(update.batch)
        if batch is None:
            report.add("event", str(update.batch), f"the batch of step {update.step} is missing")
            return
        if any(log.seen.get(group.artifact.uri) is False for group in batch.groups):
            return
        assembled = await build_step_batch(
            ports, first.spec, number=number, groups=batch.groups, rows=batch.rows
        )
        result = await ports.learner.step(
            job,
            assembled,
            export_state=update.state.durable,
            export_weights=update.state.weights is not None,
        )
        matches = await _matches_log(result, update, log, report, ports, has_forks=has_forks)
        report.steps += matches


async def _load_base(
    first: PolicyInitialized,
    base: ForkedPolicy,
    log: LogContents,
    report: AuditReport,
    ports: AuditPorts,
    job: LearnerJob,
) -> bool:
    """Load the version that a fork begins with. Whether it is the parent's version after the step, and
    its stored bytes have its hashes."""
    point, name = base.point, f"policy-{first.run}/1"
    if point != log.fork:
        report.add(
            "event", name, "the policy begins at another place than the run was requested for"
        )
    stream = policy_stream(point.parent)
    found = [one.event for one in await ports.log.events_at([(stream, point.policy_position)])]
    theirs = next(
        (e.state for e in found if isinstance(e, PolicyInitialized | PolicyUpdated)), None
    )
    ours = first.state
    if theirs is None:
        report.add(
            "event", name, f"{stream}/{point.policy_position} of its parent is not in the log"
        )
        return False
    if (ours.weights_sha256, ours.state_sha256) != (theirs.weights_sha256, theirs.state_sha256):
        report.add(
            "event",
            name,
            f"begins with {ours.weights_sha256[:16]}, not with the version "
            f"{theirs.weights_sha256[:16]} of its parent at step {point.step}",
        )
        return False
    if any(ref is None or not log.seen.get(ref.uri) for ref in (ours.weights, ours.state)):
        return False
    try:
        await ports.learner.load(job, await load_state(ports, ours, base.taken))
    except CorruptData as error:
        report.add("event", name, str(error))
        return False
    return True


async def _inherited_manifests(log: LogContents, ports: AuditPorts) -> frozenset[str]:
    """The manifests of the runs that a run is a fork of: its first checkpoint names one of these."""
    found: set[str] = set()
    point = log.fork
    while point is not None:
        stream = checkpoint_stream(point.parent)
        saved = (await ports.log.load({stream: 0})).get(stream, ())
        found |= {
            one.event.manifest.sha256
            for one in saved
            if isinstance(one.event, CheckpointSaved) and one.event.spec.step <= point.step
        }
        begins = await ports.log.events_at([(run_stream(point.parent), 1)])
        requested = begins[0].event if begins else None
        point = requested.fork if isinstance(requested, RunRequested) else None
    return frozenset(found)


async def _matches_log(
    result: StepResult,
    version: Version,
    log: LogContents,
    report: AuditReport,
    ports: AuditPorts,
    *,
    has_forks: bool,
) -> bool:
    """Whether a rebuilt version has the hashes of the log. Its stored bytes are compared too. A
    difference is a finding, except for a version of another machine in a run with forks."""
    made, recorded = result.state, version.state
    name = f"policy-{version.run} step {recorded.step}"
    for what, ours, theirs in _hash_pairs(made, recorded):
        if ours != theirs:
            machine = ""
            if result.versions != version.versions:
                if has_forks:
                    return False
                machine = f"; this machine is {result.versions}, that was {version.versions}"
            differing = await _name_tensors(made, recorded, log, ports)
            message = f"{what} rebuilt are {ours[:16]}, not {theirs[:16]}{differing}{machine}"
            report.add("event", name, message)
            return False
    report.adapter_sha256 = made.weights_file_sha256 or report.adapter_sha256
    for ref, stored in _stored_bytes(made, recorded):
        if log.seen.get(ref.uri) is False:
            await _locate_damage(ref, stored, report, ports)
    return True


def _hash_pairs(made: LearnerState, recorded: StateRef) -> Sequence[tuple[str, str, str]]:
    """The hashes of a version that must be equal: its own, and those of its files that are stored."""
    files = (
        ("bytes of the weights", made.weights_file_sha256, recorded.weights),
        ("bytes of the optimizer state", made.state_file_sha256, recorded.state),
    )
    return (
        ("weights", made.weights_sha256, recorded.weights_sha256),
        ("optimizer state", made.state_sha256, recorded.state_sha256),
        *((what, ours, ref.sha256) for what, ours, ref in files if ours and ref),
    )


async def _name_tensors(
    made: LearnerState, recorded: StateRef, log: LogContents, ports: AuditPorts
) -> str:
    """Which tensors of a version differ from those that are stored. Empty if none of it is stored."""
    names = [
        name
        for ref, ours in _stored_bytes(made, recorded)
        if log.seen.get(ref.uri)
        for name in differing_tensors(ours, await ports.artifacts.get_artifact(ref))
    ]
    return f" (differing tensors: {len(names)}, the first is {names[0]})" if names else ""


def _stored_bytes(made: LearnerState, recorded: StateRef) -> Sequence[tuple[ArtifactRef, bytes]]:
    pairs = ((recorded.weights, made.weights), (recorded.state, made.state))
    return [(ref, ours) for ref, ours in pairs if ref is not None and ours is not None]


async def _locate_damage(
    ref: ArtifactRef, ours: bytes, report: AuditReport, ports: AuditPorts
) -> None:
    """Note which bytes of a damaged blob differ from `ours`, which the rebuild has just made."""
    try:
        theirs = await ports.blobs.get_blob(ref.uri)
    except (NotFound, CorruptData):
        return
    differs = difference(ours, theirs)
    for at, finding in enumerate(report.findings):
        if finding.what == ref.uri and differs:
            names = differing_tensors(ours, theirs)
            where = f"; the first tensor that differs is {names[0]}" if names else ""
            report.findings[at] = finding.model_copy(
                update={
                    "message": finding.message + where,
                    "first_byte": differs.start,
                    "last_byte": differs.stop - 1,
                }
            )


async def _check_manifest(
    saved: CheckpointSaved, log: LogContents, report: AuditReport, ports: AuditPorts
) -> None:
    """Check that a manifest matches its step, and that every byte of it follows from the log."""
    spec, uri = saved.spec, saved.manifest.uri
    versions = {version.state.step: version.state for version in log.versions}
    version = versions.get(spec.state.step)
    if version is None or version.weights_sha256 != spec.state.weights_sha256:
        report.add("event", uri, f"the checkpoint of step {spec.step} is of a version unknown here")
    parents = [s.manifest.sha256 for s in log.saved if s.spec.step < spec.step]
    known = {parents[-1]} if parents else {None, *await _inherited_manifests(log, ports)}
    if spec.parent not in known:
        report.add("event", uri, f"the checkpoint of step {spec.step} has another parent")
    try:
        theirs = await ports.blobs.get_blob(uri)
    except NotFound:
        return
    ours = manifest_json(spec)
    if ours != theirs:
        kept = [finding for finding in report.findings if finding.what != uri]
        report.findings = kept
        report.add(
            "artifact", uri, "the manifest is not what the log says", difference(ours, theirs)
        )
        return
    report.checkpoints += 1


def difference(ours: bytes, theirs: bytes) -> range | None:
    """Return the smallest range of positions outside of which both agree, or None if they are equal. If
    one is longer, the range reaches to its end."""
    if ours == theirs:
        return None
    shorter, longer = sorted((len(ours), len(theirs)))
    first = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if shorter != longer:
        return range(first, longer)
    last = next(i for i in range(shorter - 1, -1, -1) if ours[i] != theirs[i])
    return range(first, last + 1)
