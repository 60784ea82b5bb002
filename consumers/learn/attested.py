"""Samples that the learner refuted: which weights it compares them with, and what the log says. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from schemas.effects import StepRefused
from schemas.events import BatchAssembled, SampleRefuted
from schemas.ids import GroupKey, Purpose, sample_id
from schemas.learner import GradedGroup
from schemas.models.sampling_server import server_of
from schemas.sampling import PolicyRef
from schemas.specs import StateRef
from trainer import schedule

MOST_NAMED = 64
"""How many refuted samples of a batch have an event."""
MOST_NEIGHBOURS = 16


def sampled_version(message: BatchAssembled, base: StateRef) -> PolicyRef | None:
    """Return the version that sampled a batch, or None if it has the same weights as the one that the
    step starts from."""
    sampled = message.sampled
    if sampled is None or sampled.weights is None or base.weights is None:
        return None
    return None if sampled.weights.uri == base.weights.uri else sampled


def served_by_server(groups: Sequence[GradedGroup]) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Return the places (slot, index) of the samples of a batch, by the server that made them."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for group in groups:
        for sample in group.samples:
            found[server_of(sample.servers)].append((group.slot, sample.index))
    return {server: tuple(places) for server, places in found.items()}


def refuted_samples(message: StepRefused) -> tuple[SampleRefuted, ...]:
    """Return an event for each of the first refuted samples of a batch."""
    effect, found = message.effect, message.refutations
    replacements = {group.slot: group.replacement for group in effect.groups}
    pinned = schedule.pace_of(effect.spec.config).pinned_version(effect.step)

    def name(slot: int, index: int) -> str:
        key = GroupKey(effect.spec.run, Purpose.TRAIN, effect.step, slot, replacements[slot])
        return sample_id(key.id, index)

    slots = tuple(sorted({one.slot for one in found}))
    servers = tuple(sorted({one.server for one in found}))
    return tuple(
        SampleRefuted(
            run=effect.spec.run,
            step=effect.step,
            batch=effect.batch,
            sample=name(one.slot, one.index),
            server=one.server,
            servers=servers,
            policy_version=pinned,
            test=one.test,
            tokens=one.tokens,
            log_e=one.log_e,
            distance=one.distance,
            neighbours=tuple(
                name(*place)
                for place in message.served.get(one.server, ())
                if place != (one.slot, one.index)
            )[:MOST_NEIGHBOURS],
            slots=slots,
            attempt=effect.refused + 1,
            others=max(0, len(found) - MOST_NAMED),
        )
        for one in found[:MOST_NAMED]
    )
