"""Brings a learner to the version from which the next step starts.

The log holds the hash of every version, and the bytes of some versions are stored. If a learner does not
hold the required version, it loads the newest earlier one that is stored whole and replays the steps
between. Each replayed step must give the hashes in the log. If it gives other bits the run ends, because
it would otherwise continue with other weights and nobody would notice. With `advanced.allow_divergence`
it continues from other bits, and the log records the divergence.

The learner counts the steps that were taken. A skipped step made no version, so the n-th PolicyUpdated
of a run is the learner's version n, whatever its step is.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from pydantic import ValidationError

from infra.ports.services import Datasets
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import Cursor, EventStore
from schemas.algorithms import PREFERENCE, learns_trajectories
from schemas.datasets import DatasetRow
from schemas.errors import CorruptData, Refused, ReplayDiverged, TransientError
from schemas.events import BatchAssembled, PolicyInitialized, PolicyUpdated
from schemas.ids import policy_stream
from schemas.learner import (
    Conversation,
    GradedGroup,
    LearnedRow,
    Learner,
    LearnerJob,
    LearnerState,
    Preference,
    StepBatch,
)
from schemas.sampling import Message, SampleBatch
from schemas.specs import BatchGroup, DatasetRef, StateRef, TrainSpec

PAGE = 256
"""How many batches are read from the log at once."""

NOTHING_READ = Cursor()

Version = PolicyInitialized | PolicyUpdated

ADVICE = (
    "continue on a machine like the first, or submit the run with --allow-divergence "
    "(advanced.allow_divergence), which goes on with the new bits"
)


def job_of(spec: TrainSpec) -> LearnerJob:
    """Return what the learner needs to know about a run."""
    return LearnerJob(
        run=spec.run,
        config=spec.config,
        model=spec.model,
        total_steps=spec.total_steps,
        rules=spec.rules,
        date=spec.date,
        teacher=spec.teacher,
    )


@dataclass(frozen=True, slots=True)
class HistoryPorts:
    """The ports to what a run has recorded."""

    log: EventStore
    artifacts: Artifacts
    datasets: Datasets


async def ensure_loaded(
    learner: Learner,
    ports: HistoryPorts,
    spec: TrainSpec,
    base: StateRef,
    *,
    taken: int,
    alias: str | None = None,
) -> str | None:
    """Make the learner hold version `taken`, whose hashes are in `base`, under the name of the run or
    under `alias`. Returns how the first replayed step differed, if the run allows that
    (`advanced.allow_divergence`), otherwise None. Raises ReplayDiverged, CorruptData, and
    TransientError while the log cannot be read that far.

    Other runs may load their versions into the same learner while this function waits for IO. So it
    reads everything first, and from `load` on it calls only the learner.
    """
    job = replace(job_of(spec), run=alias or spec.run)
    if learner.holds(job, taken, base.weights_sha256, base.state_sha256):
        return None
    versions = await read_versions(ports, spec.run)
    if taken not in versions or versions[taken].state != base:
        raise TransientError(f"the log does not show version {taken} of {spec.run} yet")
    start = max(n for n, version in versions.items() if n <= taken and version.state.durable)
    later = (versions[number] for number in range(start + 1, taken + 1))
    replayed = [version for version in later if isinstance(version, PolicyUpdated)]
    assembled = await read_batches(ports, spec.run, replayed)
    batches = [
        await build_step_batch(ports, spec, number=number, groups=batch.groups, rows=batch.rows)
        for number, batch in enumerate(assembled, start=start + 1)
    ]
    await learner.load(job, await load_state(ports, versions[start].state, start))
    fork = None
    for batch, updated in zip(batches, replayed, strict=True):
        result = await learner.step(job, batch, export_state=False, export_weights=False)
        try:
            compare(result.state, updated)
        except ReplayDiverged as error:
            if not spec.config.advanced.allow_divergence:
                raise ReplayDiverged(f"{error}; {ADVICE}") from error
            fork = fork or str(error)
    return fork


async def read_versions(ports: HistoryPorts, run: str) -> dict[int, Version]:
    """Return the versions of a run by their numbers. Those of a fork begin with the number of its
    parent's version."""
    stream = policy_stream(run)
    history = (await ports.log.load({stream: 0})).get(stream, ())
    events = (recorded.event for recorded in history)
    found = [event for event in events if isinstance(event, PolicyInitialized | PolicyUpdated)]
    return dict(enumerate(found, start=first_number(found[0]) if found else 0))


def first_number(first: Version) -> int:
    """The learner's number of the first version of a run: how many steps of its parents led to it."""
    return first.fork.taken if isinstance(first, PolicyInitialized) and first.fork else 0


async def load_state(ports: HistoryPorts, state: StateRef, number: int) -> LearnerState:
    """Return the bytes of a version that was stored whole. Raises CorruptData for any other."""
    if state.weights is None or state.state is None:
        raise CorruptData(f"version {state.step} was not stored whole")
    return LearnerState(
        step=number,
        weights=await ports.artifacts.get_artifact(state.weights),
        weights_sha256=state.weights_sha256,
        state=await ports.artifacts.get_artifact(state.state),
        state_sha256=state.state_sha256,
        weights_file_sha256=state.weights.sha256,
        state_file_sha256=state.state.sha256,
    )


async def read_batches(
    ports: HistoryPorts, run: str, wanted: Sequence[PolicyUpdated], *, after: Cursor = NOTHING_READ
) -> list[BatchAssembled]:
    """Return the batches of these steps from the log. `after` is the place of an event before them.
    Raises TransientError while the log does not show them all."""
    ids = {updated.batch for updated in wanted}
    found: dict[UUID, BatchAssembled] = {}
    cursor = after
    while len(found) < len(ids):
        page = await ports.log.read(run, after=cursor, limit=PAGE, types=[BatchAssembled.type])
        if not page:
            raise TransientError(f"the log does not show all batches of {run} yet")
        for recorded in page:
            if recorded.id in ids and isinstance(recorded.event, BatchAssembled):
                found[recorded.id] = recorded.event
        cursor = page[-1].cursor
    return [found[updated.batch] for updated in wanted]


def compare(made: LearnerState, updated: PolicyUpdated) -> None:
    """Check that a replayed step gave the same bits as the first time. Raises ReplayDiverged."""
    recorded = updated.state
    pairs = (
        ("weights", made.weights_sha256, recorded.weights_sha256),
        ("state", made.state_sha256, recorded.state_sha256),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            raise ReplayDiverged(
                f"step {updated.step}, taken again, gave other {what}: {ours[:16]} instead of "
                f"{theirs[:16]}. Device, torch version, kernels or thread count have changed since "
                f"({updated.versions})"
            )


async def build_step_batch(
    ports: HistoryPorts,
    spec: TrainSpec,
    *,
    number: int,
    groups: Sequence[BatchGroup],
    rows: Sequence[int],
) -> StepBatch:
    """Return the batch of the learner's step `number`: groups in slot order, dataset rows in the order
    of `rows`. Recorded groups have the order of the dataset, in which they were sampled. Raises
    CorruptData when an artifact does not hold samples, Refused for a row without an answer to learn."""
    if rows and learns_trajectories(spec.config.advanced):
        return StepBatch(step=number, groups=await _read_trajectories(ports, spec.dataset, rows))
    ordered = sorted(groups, key=lambda group: group.slot)
    graded = await asyncio.gather(*(_read_group(ports, group) for group in ordered))
    learned = await read_learned_rows(ports, spec, spec.dataset, rows) if rows else ()
    return StepBatch(
        step=number,
        groups=tuple(graded),
        conversations=tuple(one for one in learned if isinstance(one, Conversation)),
        preferences=tuple(one for one in learned if isinstance(one, Preference)),
    )


async def _read_group(ports: HistoryPorts, group: BatchGroup) -> GradedGroup:
    data = await ports.artifacts.get_artifact(group.artifact)
    try:
        batch = SampleBatch.model_validate_json(data)
    except ValidationError as error:
        raise CorruptData(f"{group.artifact.uri} does not hold samples: {error}") from error
    return GradedGroup(
        slot=group.slot,
        samples=batch.samples,
        rewards=group.rewards,
        parts=group.parts,
        hint=batch.teacher_hint,
        teacher_tokens=batch.teacher_tokens,
    )


async def _read_trajectories(
    ports: HistoryPorts, dataset: DatasetRef, rows: Sequence[int]
) -> tuple[GradedGroup, ...]:
    """Return recorded groups as a step learns from them. Raises Refused for a row of another kind."""
    content = await ports.datasets.rows(dataset)
    found = []
    for slot, row in enumerate(sorted(rows)):
        trajectory = content[row].trajectory
        if trajectory is None:
            raise Refused(f"row {row} of {dataset.name} has no recorded group to learn from")
        found.append(GradedGroup(slot=slot, samples=trajectory.samples, rewards=trajectory.rewards))
    return tuple(found)


async def read_learned_rows(
    ports: HistoryPorts, spec: TrainSpec, dataset: DatasetRef, rows: Sequence[int]
) -> tuple[LearnedRow, ...]:
    """Return dataset rows as the run learns them: as preferences or as demonstrations. Raises Refused
    for a row without an answer."""
    content = await ports.datasets.rows(dataset)
    if spec.config.advanced.algorithm not in PREFERENCE:
        return tuple(_demonstration(row, content[row], dataset) for row in rows)
    return tuple(
        Preference(
            row=row,
            prompt=content[row].prompt,
            chosen=content[row].chosen,
            rejected=content[row].rejected,
            margin=content[row].margin,
            tools=content[row].tools,
        )
        for row in rows
    )


def _demonstration(row: int, content: DatasetRow, dataset: DatasetRef) -> Conversation:
    """Return a row as a demonstration: its prompt, answered with its label or its chosen answer."""
    text = content.chosen if content.label is None else content.label
    if text is None:
        raise Refused(f"row {row} of {dataset.name} has no label to learn from")
    answer = Message(role="assistant", content=text)
    return Conversation(row=row, messages=(*content.prompt, answer), tools=content.tools)
