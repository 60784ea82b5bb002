"""Generates the samples of requested groups.
Reads: GroupsRequested.  Emits: SampleGenerated, GroupGenerated.  Stream: group.
Does: samples a group, or runs the user's workflow per sample; in a fork that replays recorded samples,
finds those of its parent (lane: generate).  Waits for: nothing.
Safe to repeat because: one group stream per slot; a recorded sample or group decides nothing.

A finished group has exactly `num_samples` entries, and a failed sample has an entry with its failure.
`consumers/rollout/sampling.py` makes the samples.
"""

from dataclasses import dataclass, replace
from typing import assert_never

from consumers.rollout.replaying import find_recorded
from consumers.rollout.sampling import RolloutPorts, alarm_once, generate_group, generate_sample
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.costs.work import Work, spent_by
from schemas.effects import (
    Effect,
    Failed,
    GenerateGroup,
    GenerateSample,
    GroupReplayed,
    GroupSampled,
    ReplayGroup,
    SampleFinished,
)
from schemas.events import GroupGenerated, GroupsRequested, SampleGenerated
from schemas.ids import ConsumerName, GroupKey, StreamName, group_stream
from schemas.specs import GroupSpec, SampleEntry

GroupEvent = SampleGenerated | GroupGenerated
GroupMessage = GroupsRequested | GroupReplayed | GroupSampled | SampleFinished | Failed


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that is finished. It has no artifact if its workers gave up."""

    entry: SampleEntry
    artifact: ArtifactRef | None
    seconds: float = 0.0
    files: tuple[ArtifactRef, ...] = ()
    work: Work | None = None


@dataclass(frozen=True, slots=True)
class GroupState:
    """The samples finished so far, in the order of their index. It is empty once the group is done."""

    samples: tuple[Finished, ...] = ()
    done: bool = False

    def holds(self, index: int) -> bool:
        return self.done or any(sample.entry.index == index for sample in self.samples)


def evolve(state: GroupState, event: GroupEvent) -> GroupState:
    """Return the state after one event of a group stream."""
    match event:
        case SampleGenerated():
            finished = Finished(event.entry, event.artifact, event.seconds, work=event.work)
            return replace(state, samples=_add_sample(state, finished))
        case GroupGenerated():
            return GroupState(done=True)
        case _:
            assert_never(event)


def _add_sample(state: GroupState, sample: Finished) -> tuple[Finished, ...]:
    return tuple(sorted((*state.samples, sample), key=lambda each: each.entry.index))


def handle(state: GroupState, message: GroupMessage, meta: Meta) -> Decision:
    """Request the samples that the group lacks. Record each sample, and the group with its last one."""
    match message:
        case GroupsRequested() if not state.done:
            spec = _group_spec(message, meta.stream)
            if spec.template.replay_of is not None and not state.samples:
                return Decision(effects=(ReplayGroup(spec=spec),))
            return Decision(effects=_requested_effects(state, spec))
        case GroupReplayed(effect=ReplayGroup(spec=spec)) if not state.done:
            if message.problem is not None:
                return Decision(effects=_requested_effects(state, spec))
            replayed = GroupGenerated(
                spec=spec,
                entries=message.entries,
                parts=message.parts,
                replayed=spec.template.replay_of,
            )
            return Decision(events=(replayed,))
        case GroupSampled(effect=GenerateGroup(spec=spec)) if not state.done:
            generated = GroupGenerated(
                spec=spec,
                entries=message.entries,
                parts=(message.artifact,),
                seconds=meta.seconds,
                work=meta.work,
                spent=spent_by([meta.work]),
            )
            return Decision(events=(generated,))
        case SampleFinished(effect=GenerateSample(spec=spec)):
            finished = Finished(
                message.entry, message.artifact, meta.seconds, message.files, meta.work
            )
            return _record(state, spec, finished)
        case Failed(effect=GenerateSample(spec=spec, index=index)):
            failed = Finished(_failed_entry(message, index), None, work=meta.work)
            return _record(state, spec, failed)
        case Failed(effect=ReplayGroup(spec=spec)) if not state.done:
            return Decision(effects=_requested_effects(state, spec))
        case Failed(effect=GenerateGroup(spec=spec)) if not state.done:
            num = spec.template.num_samples
            entries = tuple(_failed_entry(message, index, num_samples=num) for index in range(num))
            generated = GroupGenerated(
                spec=spec, entries=entries, parts=(), work=meta.work, spent=spent_by([meta.work])
            )
            return Decision(events=(generated,))
        case _:
            return NOTHING


def _group_spec(message: GroupsRequested, stream: StreamName) -> GroupSpec:
    """Return the group of the request that `stream` is about."""
    group = stream.partition("-")[2]
    key = GroupKey.parse(group)
    place = (key.slot, key.replacement)
    slot = next(slot for slot in message.slots if (slot.slot, slot.replacement) == place)
    return GroupSpec(group=group, row=slot.row, template=message.template, attempts=slot.attempts)


def _requested_effects(state: GroupState, spec: GroupSpec) -> tuple[Effect, ...]:
    rollout = spec.template.rollout
    if rollout is None or not rollout.makes_attempts:
        return (GenerateGroup(spec=spec),)
    indices = range(spec.template.num_samples)
    return tuple(GenerateSample(spec=spec, index=i) for i in indices if not state.holds(i))


def _record(state: GroupState, spec: GroupSpec, sample: Finished) -> Decision:
    """Record the sample, and also the group when this was its last sample."""
    if state.holds(sample.entry.index):
        return NOTHING
    generated = SampleGenerated(
        spec=spec,
        entry=sample.entry,
        artifact=sample.artifact,
        seconds=sample.seconds,
        files=sample.files,
        work=sample.work,
    )
    samples = _add_sample(state, sample)
    num_samples = spec.template.num_samples
    if len(samples) < num_samples:
        return Decision(events=(generated,))
    group = GroupGenerated(
        spec=spec,
        entries=alarm_once(_shorten(each.entry, num_samples) for each in samples),
        parts=tuple(each.artifact for each in samples if each.artifact is not None),
        seconds=max(each.seconds for each in samples),
        spent=spent_by(each.work for each in samples),
    )
    return Decision(events=(generated, group))


def _shorten(entry: SampleEntry, num_samples: int) -> SampleEntry:
    if entry.message is None:
        return entry
    return entry.model_copy(update={"message": excerpt(entry.message, num_samples=num_samples)})


def _failed_entry(message: Failed, index: int, *, num_samples: int = 1) -> SampleEntry:
    text = excerpt(message.message, num_samples=num_samples)
    return SampleEntry(index=index, failure=str(message.category), message=text)


def routes(message: GroupMessage) -> tuple[StreamName, ...]:
    """Return one stream for each requested group."""
    if not isinstance(message, GroupsRequested):
        return ()
    prefix = f"{message.owner}-{message.purpose}-{message.step}"
    return tuple(group_stream(f"{prefix}-{s.slot}-{s.replacement}") for s in message.slots)


async def perform(
    effect: GenerateGroup | GenerateSample | ReplayGroup, ports: RolloutPorts
) -> GroupSampled | SampleFinished | GroupReplayed:
    """Sample a group, or one sample with the user's workflow, or find the recorded samples of a group.
    Returns the artifact and its entries. An error of the workflow is in the record of its sample, and is
    not raised."""
    match effect:
        case ReplayGroup():
            return await find_recorded(effect, ports.log)
        case GenerateGroup():
            return await generate_group(effect, ports)
        case GenerateSample():
            return await generate_sample(effect, ports)
        case _:
            assert_never(effect)


CONSUMER: Consumer[
    GroupState,
    GroupEvent,
    GroupMessage,
    GenerateGroup | GenerateSample | ReplayGroup,
    RolloutPorts,
] = Consumer(
    name=ConsumerName("rollout"),
    category="group",
    reads=(GroupsRequested,),
    emits=(SampleGenerated, GroupGenerated),
    effects=(GenerateGroup, GenerateSample, ReplayGroup),
    initial=GroupState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=RolloutPorts,
)
