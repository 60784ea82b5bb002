"""Builds the first version of a fork: that of its parent right after a step.

Versions that the parent keeps for good are taken over by reference. Another one is rebuilt as recovery
rebuilds it (`consumers/learn/replay.py`): from the newest version that is stored whole, under the
parent's spec, to the hashes in the parent's log. It is then stored for the fork, because the parent
discards its own copy. The same holds for the weights of earlier versions with which groups of the fork
sample in the asynchronous modes.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from consumers.learn.replay import (
    NOTHING_READ,
    HistoryPorts,
    Version,
    build_step_batch,
    compare,
    first_number,
    job_of,
    load_state,
    read_batches,
)
from consumers.learn.versions import store_version
from infra.spine.ports.event_log import Recorded
from schemas.algorithms import samples_nothing
from schemas.config import RunConfig
from schemas.effects import InitializePolicy, PolicyBuilt
from schemas.errors import CorruptData, NotFound, Refused, ReplayDiverged, TransientError
from schemas.events import Event, PolicyInitialized, PolicyUpdated, RunWarned, SampleRefuted
from schemas.ids import policy_stream
from schemas.learner import Learner, LearnerState
from schemas.models.fork import EarlierWeights, ForkedPolicy, ForkPoint
from schemas.specs import StateRef, TrainSpec
from trainer import schedule

PAGE = 64
"""How many events of the parent's policy are read at once, backwards from the fork."""

MOST_READ = 500
"""How many warnings or refuted samples are read at once."""

ADVICE = "fork at a step with a checkpoint, or on a machine like the one that trained the parent"

SPARE_TRIED = 2
"""How many versions are tried that the parent may have discarded by now."""


@dataclass(frozen=True, slots=True)
class PastVersion:
    """A version of the parent. `number` is how many steps led to it."""

    number: int
    recorded: Recorded
    version: Version

    @property
    def state(self) -> StateRef:
        return self.version.state

    @property
    def is_kept(self) -> bool:
        """Whether its bytes stay, and are all there."""
        version = self.version
        is_kept = isinstance(version, PolicyInitialized) or version.pinned
        return is_kept and version.state.durable


async def fork_policy(
    effect: InitializePolicy, point: ForkPoint, learner: Learner, ports: HistoryPorts
) -> PolicyBuilt:
    """Return the version that a fork begins with, stored for good, and the weights of earlier versions
    that its groups sample with. Raises Refused when the parent's log is gone, ReplayDiverged,
    CorruptData, TransientError."""
    spec = effect.spec
    first = await _read_first(ports, point)
    sampled = sampled_steps(spec.config, point)
    past = await _read_back(ports, point, first, oldest=min(sampled, default=None))
    base = past[-1]
    wanted = {step: _version_at(past, step) for step in sampled}
    older = {one.number: one for one in wanted.values() if one is not None}
    built = await _take_over(past, older, base, spec, first.spec, learner, ports)
    inherited = {one.step: one.weights for one in first.fork.weights} if first.fork else {}
    weights = {
        step: inherited.get(step) if one is None else built[one.number].weights
        for step, one in wanted.items()
    }
    if None in weights.values():
        steps = [step for step, ref in weights.items() if ref is None]
        raise Refused(
            f"the groups of this fork sample with the versions of steps {steps}, which its parent does "
            "not have; choose a smaller advanced.max_steps_off_policy, or fork at a later step"
        )
    return PolicyBuilt(
        effect=effect,
        state=built[base.number],
        versions=base.version.versions,
        files=first.files,
        weights_name=first.weights_name,
        forked=ForkedPolicy(
            point=point,
            taken=base.number,
            weights=tuple(
                EarlierWeights(step=step, weights=ref)
                for step, ref in sorted(weights.items())
                if ref is not None
            ),
        ),
    )


def sampled_steps(config: RunConfig, point: ForkPoint) -> list[int]:
    """Return the steps of the parent with whose versions groups of the fork sample, besides its own
    first one."""
    if samples_nothing(config.advanced):
        return []
    pace = schedule.pace_of(config)
    due = range(point.step + 1, point.step + pace.depth + pace.interval + 1)
    pinned = {pace.pinned_version(step) for step in due}
    return sorted(step for step in pinned if step < point.step)


async def _read_first(ports: HistoryPorts, point: ForkPoint) -> PolicyInitialized:
    found = await ports.log.events_at([(policy_stream(point.parent), 1)])
    if not found or not isinstance(found[0].event, PolicyInitialized):
        raise Refused(
            f"the log of run {point.parent} does not hold its first version any more; if the run is "
            "archived, restore it (`headrace train restore`), then fork it again"
        )
    return found[0].event


async def _read_back(
    ports: HistoryPorts, point: ForkPoint, first: PolicyInitialized, *, oldest: int | None
) -> list[PastVersion]:
    """Return the versions of the parent up to that of the fork, in order, from one that is kept and not
    newer than step `oldest`. Raises TransientError while the log does not show them."""
    stream, last = policy_stream(point.parent), point.policy_position
    not_yet = f"the log does not show version {last} of {point.parent} yet"
    if not await _is_readable(ports, point):
        raise TransientError(not_yet)
    others = await _refuted_positions(ports, point)
    found: list[PastVersion] = []
    while last > 0 and not _reaches_back(found, oldest):
        above = max(0, last - PAGE)
        page = (await ports.log.load({stream: above}, limit=last - above))[stream]
        if len(page) < last - above:
            raise TransientError(not_yet)
        read = [
            PastVersion(
                first_number(first) + recorded.version - 1 - bisect_left(others, recorded.version),
                recorded,
                recorded.event,
            )
            for recorded in page
            if isinstance(recorded.event, PolicyInitialized | PolicyUpdated)
        ]
        found, last = [*read, *found], above
    return found


async def _is_readable(ports: HistoryPorts, point: ForkPoint) -> bool:
    """Whether the version of the fork is below the horizon of the log, so that all that came before it
    is read."""
    stream, last = policy_stream(point.parent), point.policy_position
    found = {
        one.version: one for one in await ports.log.events_at([(stream, last - 1), (stream, last)])
    }
    after = found[last - 1].cursor if last - 1 in found else NOTHING_READ
    types = [PolicyInitialized.type, PolicyUpdated.type]
    page = await ports.log.read(point.parent, after=after, limit=1, types=types)
    return last in found and bool(page) and page[0].id == found[last].id


async def _refuted_positions(ports: HistoryPorts, point: ForkPoint) -> list[int]:
    """Return the places in the parent's policy stream that hold refuted samples and no versions. They
    are searched for only if the parent warned of such samples, because few runs have any and the search
    reads the whole log."""
    warned = await _read_all(ports, point.parent, RunWarned)
    if not any(isinstance(one.event, RunWarned) and one.event.about == "refuted" for one in warned):
        return []
    refuted = await _read_all(ports, point.parent, SampleRefuted)
    return sorted(one.version for one in refuted)


async def _read_all(ports: HistoryPorts, run: str, kind: type[Event]) -> list[Recorded]:
    found: list[Recorded] = []
    while True:
        after = found[-1].cursor if found else NOTHING_READ
        page = await ports.log.read(run, after=after, limit=MOST_READ, types=[kind.type])
        found += page
        if len(page) < MOST_READ:
            return found


def _reaches_back(past: Sequence[PastVersion], oldest: int | None) -> bool:
    return any(one.is_kept and (oldest is None or one.state.step <= oldest) for one in past)


def _version_at(past: Sequence[PastVersion], step: int) -> PastVersion | None:
    """The version of a step, which a skipped step has from the one before. None: it is one of a parent
    of the parent."""
    return next((one for one in reversed(past) if one.state.step <= step), None)


async def _take_over(
    past: Sequence[PastVersion],
    older: Mapping[int, PastVersion],
    base: PastVersion,
    spec: TrainSpec,
    parent: TrainSpec,
    learner: Learner,
    ports: HistoryPorts,
) -> dict[int, StateRef]:
    """Return where the fork finds these versions, by number: at the parent's if it keeps them, else at
    its own."""
    versions = {**older, base.number: base}
    kept = {number: one.state for number, one in versions.items() if one.is_kept}
    missing = sorted(number for number in versions if number not in kept)
    if not missing:
        return kept
    start, state = await _load_start(past, missing[0], ports)
    later = [one for one in past if start.number < one.number <= missing[-1]]
    updates = [one.version for one in later if isinstance(one.version, PolicyUpdated)]
    batches = await read_batches(ports, parent.run, updates, after=start.recorded.cursor)
    assembled = [
        await build_step_batch(
            ports, parent, number=one.number, groups=batch.groups, rows=batch.rows
        )
        for one, batch in zip(later, batches, strict=True)
    ]
    diverged = {
        one.number: await load_state(ports, update.state, one.number)
        for one, update in zip(later, updates, strict=True)
        if update.fork is not None
    }
    job = replace(job_of(parent), run=f"{spec.run}.base")
    made: dict[int, LearnerState] = {start.number: state}
    await learner.load(job, state)
    for one, update, batch in zip(later, updates, assembled, strict=True):
        if one.number in diverged:
            made[one.number] = diverged[one.number]
            await learner.load(job, diverged[one.number])
            continue
        is_wanted = one.number in missing
        exports_state = is_wanted and one.number == base.number
        result = await learner.step(
            job, batch, export_state=exports_state, export_weights=is_wanted
        )
        try:
            compare(result.state, update)
        except ReplayDiverged as error:
            raise ReplayDiverged(f"{error}; {ADVICE}") from error
        made[one.number] = result.state
    for number in missing:
        own = made[number] if number == base.number else replace(made[number], state=None)
        step = versions[number].state.step
        kept[number] = await store_version(own, ports.artifacts, spec.run, step=step)
    return kept


async def _load_start(
    past: Sequence[PastVersion], newest: int, ports: HistoryPorts
) -> tuple[PastVersion, LearnerState]:
    """Return the newest version up to number `newest` whose bytes are all there. The parent may discard
    one that it does not keep at any time, so only a few of those are tried."""
    spare = 0
    for one in reversed(past):
        if one.number > newest or not one.state.durable:
            continue
        if one.is_kept:
            return one, await load_state(ports, one.state, one.number)
        if spare < SPARE_TRIED:
            spare += 1
            with suppress(NotFound):
                return one, await load_state(ports, one.state, one.number)
    raise CorruptData(
        f"no version up to step {past[-1].state.step} is stored whole; bring the blobs back from a "
        "backup"
    )
