"""Derives what a run waits for, with a pure function of facts that were read at one moment.

The most blocking reason comes first. Work that is in progress comes last.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

What = Literal[
    "letter", "stalled", "gate", "disk", "git", "store", "retry", "lease", "capacity", "horizon",
    "broker", "workers", "effect", "decision", "approval", "packages", "release", "quota",
]  # fmt: skip

UNSEEN_S = 10.0
"""A broker that was not seen for so long is away: the relay looks every second or so."""

OLD_HORIZON_S = 1.0
"""A transaction that holds the horizon for less than this is everyday work."""

MOST_WAITS = 8

SAMPLING = "sampling"
DOING = {
    "FetchCommit": "fetching the commit",
    "DiscoverRollouts": "finding the rollouts of the commit",
    "InitializePolicy": "loading the model",
    "GenerateGroup": SAMPLING,
    "GenerateSample": SAMPLING,
    "GradeGroup": "grading",
    "TrainStep": "training",
    "SaveCheckpoint": "saving a checkpoint",
}
"""The work of a run, by the type of its effect."""

HOUR_S = 3600.0
MOST_SILENT_S: Mapping[str, float] = {
    "control": HOUR_S,
    "submit": HOUR_S,
    "serve": HOUR_S,
    "user": 2 * HOUR_S,
    "generate": 2 * HOUR_S,
    "train": 3 * HOUR_S,
    "export": 3 * HOUR_S,
}
"""How long an effect of a lane may be performed without progress before it counts as stalled. Each is
far above the time that the work of the lane takes: a fetch gives up after 20 minutes. An attempt ends
after six hours at most."""

DISK = ("disk", "no space left")
STORE = ("blob", "s3", "store", "bucket")


class WaitJson(TypedDict):
    """One reason to wait. `what` is one of a few words for programs, `message` a sentence for people."""

    what: What
    message: str


@dataclass(frozen=True, slots=True)
class EffectFact:
    """An effect that is not finished. `worker` is None if no worker holds it. `lease_s` is the seconds
    until its worker's lease ends, and is negative after that. `due_s` is the seconds until it may be
    claimed. `step` is that of its group, if it makes or grades samples of a training step. `silent_s` is
    the seconds since a worker claimed it or saved its progress."""

    type: str
    lane: str
    worker: str | None = None
    lease_s: float | None = None
    due_s: float = 0.0
    attempts: int = 0
    deaths: int = 0
    error: str | None = None
    step: int | None = None
    silent_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepFact:
    """How many samples of a training step are graded, of how many."""

    step: int
    graded: int
    total: int


@dataclass(frozen=True, slots=True)
class WorkerFact:
    """A worker with a live lease. `held` counts the effects that it holds, of any run. `decider` is its
    decider version (`schemas/events/decider_version.py`)."""

    id: str
    host: str
    pid: int
    lanes: tuple[str, ...]
    lease_s: float
    held: int = 0
    decider: int = 1


@dataclass(frozen=True, slots=True)
class HolderFact:
    """A writing transaction of our database. If `pid` is None, it is a prepared one called `name`."""

    database: str
    username: str
    pid: int | None = None
    name: str | None = None
    application: str | None = None
    address: str | None = None
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LetterFact:
    id: str
    consumer: str
    cause: str


@dataclass(frozen=True, slots=True)
class NewerRunFact:
    """An open run that needs a decider version above 1."""

    run: str
    decider: int


@dataclass(frozen=True, slots=True)
class NewerEventFact:
    """An event of the run, or of anything, that this release does not know."""

    event: str
    type: str
    version: int


@dataclass(frozen=True, slots=True)
class QuotaFact:
    """How many samples the runs of a workspace have in flight, and how many they may have."""

    used: int
    most: int


@dataclass(frozen=True, slots=True)
class BrokerFact:
    """The state of Kafka. `seen_s` is the seconds since the relay last saw it. `behind` counts the
    events that are not published."""

    seen_s: float | None
    behind: int


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that were read. `status` is that of the run ("running" for the whole platform). `hidden`
    says that one of its events is committed above the horizon. `undecided` lists the consumers that have
    not passed its last event, and `full` the directories on full disks. `sampled` is the oldest step
    whose samples are being made. `newer` are the runs of newer releases, and `unknown` is an event of a
    waiting run that this release does not know. `quota` is that of its workspace, if its next sample
    waits for others of the workspace."""

    status: str = "running"
    gate: str = "open"
    letters: Sequence[LetterFact] = ()
    effects: Sequence[EffectFact] = ()
    workers: Sequence[WorkerFact] = ()
    holders: Sequence[HolderFact] = ()
    hidden: bool = False
    undecided: Sequence[str] = ()
    broker: BrokerFact | None = None
    full: Sequence[str] = ()
    sampled: StepFact | None = None
    newer: Sequence[NewerRunFact] = ()
    unknown: NewerEventFact | None = None
    quota: QuotaFact | None = None


def waits_of(facts: Facts) -> list[WaitJson]:
    """Return everything that this run waits for. It is empty when the run has ended, or when nothing
    delays it."""
    if facts.status not in ("pending", "running"):
        return []
    reasons = (
        _letters,
        _releases,
        _stalls,
        _gate,
        _quota,
        _disks,
        _retries,
        _leases,
        _capacity,
        _horizon,
        _broker,
        _workers,
    )
    found = [wait for reason in reasons for wait in reason(facts)]
    found += list(_work_in_progress(facts)) or ([] if found else list(_decisions(facts)))
    return found[:MOST_WAITS]


def without_machines(facts: Facts) -> Facts:
    """Return the facts as those may see them who share the installation with others: workers are
    numbered, and nothing names a host, a process, a directory or a user of the database."""
    ids = [worker.id for worker in facts.workers]
    ids += [effect.worker for effect in facts.effects if effect.worker]
    named = {id_: f"worker {number}" for number, id_ in enumerate(dict.fromkeys(ids), 1)}
    return replace(
        facts,
        effects=[replace(e, worker=named.get(e.worker or "")) for e in facts.effects],
        workers=[replace(w, id=named[w.id], host="", pid=0) for w in facts.workers],
        holders=[HolderFact("", "", since_s=holder.since_s) for holder in facts.holders],
        full=["data"] if facts.full else [],
    )


def wait_for_approval(name: str) -> WaitJson:
    """The reason why a run waits whose trigger has `require_approval`."""
    return _wait("approval", f"waits for approval: `headrace train approve {name}` starts it")


def describe_holder(holder: HolderFact) -> str:
    """Describe a transaction that holds the horizon back, and say how to end it."""
    if not holder.database:
        return f"another transaction of the database, open since {_ago(holder.since_s)}"
    if holder.pid is None:
        end = f"commit prepared or rollback prepared '{holder.name}'"
        return (
            f"prepared transaction '{holder.name}' of {holder.username} in database "
            f"{holder.database}, prepared {_ago(holder.since_s)}; end it: {end}"
        )
    of = f"{holder.application or 'no application name'}, user {holder.username}"
    where = f" from {holder.address}" if holder.address else ""
    return (
        f"the transaction of pid {holder.pid} ({of}{where}) in database {holder.database}, open "
        f"since {_ago(holder.since_s)}; end it: select pg_terminate_backend({holder.pid})"
    )


def _letters(facts: Facts) -> Iterator[WaitJson]:
    for letter in facts.letters:
        yield _wait(
            "letter",
            f"dead letter {letter.id} of {letter.consumer} holds it: {letter.cause}; when the cause is "
            f"mended: headrace dlq redrive {letter.id[:8]}",
        )


def _releases(facts: Facts) -> Iterator[WaitJson]:
    """Yield the runs that began under a newer release than that of every live worker, and the event of a
    newer release at which a run stands. Without a live worker nobody knows, and `_workers` says so."""
    newest = max((worker.decider for worker in facts.workers), default=0)
    for needed in facts.newer:
        if facts.workers and needed.decider > newest:
            yield _wait(
                "release",
                f"run {needed.run} began under a newer release of Headrace (decider version "
                f"{needed.decider}), and the newest live worker has {newest or 'none'}; start workers "
                "of that release or of a newer one",
            )
    if facts.unknown is not None:
        event = facts.unknown
        yield _wait(
            "release",
            f"a newer release of Headrace wrote {event.event} ({event.type} version {event.version}), "
            "which this one does not know; start workers of that release or of a newer one, and stop "
            "older ones",
        )


def _stalls(facts: Facts) -> Iterator[WaitJson]:
    """Yield the effects that a live worker holds without progress for far longer than usual."""
    for effect in facts.effects:
        silent_s = effect.silent_s or 0.0
        if _is_held(effect) and silent_s > MOST_SILENT_S.get(effect.lane, math.inf):
            told = describe_stall(effect.type, effect.lane, str(effect.worker), silent_s)
            yield _wait("stalled", told)


def describe_stall(type_: str, lane: str, worker: str, silent_s: float) -> str:
    """Describe an effect without progress, and say what to do."""
    return (
        f"{type_} shows no progress: {worker} claimed it {_ago(silent_s)}, and work in lane {lane} "
        f"takes at most {MOST_SILENT_S[lane] / HOUR_S:.0f} h; read the log of that worker, then end its "
        "process, and another worker takes the work over"
    )


def _gate(facts: Facts) -> Iterator[WaitJson]:
    if facts.gate == "paused" and not facts.letters:
        yield _wait("gate", "it is paused: headrace train resume")


def _quota(facts: Facts) -> Iterator[WaitJson]:
    if facts.quota is not None:
        used, most = facts.quota.used, facts.quota.most
        yield _wait(
            "quota",
            f"its workspace has {used} samples in flight and may have {most}; `headrace workspace "
            "quotas` shows its limits, and an administrator may change samples_in_flight",
        )


def _disks(facts: Facts) -> Iterator[WaitJson]:
    for directory in facts.full:
        yield _wait("disk", f"the disk that holds {directory} is full; free space on it")


def _retries(facts: Facts) -> Iterator[WaitJson]:
    """Yield the effects that failed and will be retried, grouped by their error."""
    failed = [e for e in facts.effects if e.error and not _is_held(e)]
    for (type_, error), count in Counter((e.type, e.error or "") for e in failed).items():
        due = min(e.due_s for e in failed if (e.type, e.error) == (type_, error))
        when = f"again in {due:.0f} s" if due >= 1 else "again now"
        yield _wait(_cause(type_, error), f"{_effects(count, type_)} failed, {when}: {error}")


def _cause(type_: str, error: str) -> What:
    said = error.lower()
    if any(word in said for word in DISK):
        return "disk"
    if type_ == "FetchCommit":
        return "git"
    if type_ == "DiscoverRollouts":
        return "packages"
    return "store" if any(word in said for word in STORE) else "retry"


def _leases(facts: Facts) -> Iterator[WaitJson]:
    """Yield the effects that a worker without a live lease holds. Another worker takes them over
    soon."""
    for effect in _distinct(e for e in facts.effects if e.worker and not _is_held(e)):
        ended = f"ended {_ago(-effect.lease_s)}" if effect.lease_s is not None else "is unknown"
        taken = "another worker takes it over"
        if not _able(facts, effect.lane):
            taken = f"no live worker takes lane {effect.lane}"
        yield _wait(
            "lease", f"{effect.type} was claimed by {effect.worker}, whose lease {ended}; {taken}"
        )


def _capacity(facts: Facts) -> Iterator[WaitJson]:
    """Yield the effects that are due and that no worker holds, unless a live worker performs others of
    their lane. Then they wait for their turn."""
    due = [e for e in facts.effects if e.worker is None and e.due_s <= 0 and not e.error]
    for lane, count in Counter(e.lane for e in due).items():
        able = _able(facts, lane)
        if able and any(e.lane == lane and _is_on_time(e) for e in facts.effects):
            continue
        if able and lane == "generate" and facts.quota is not None:
            continue  # `_quota` says why no worker claims them
        types = ", ".join(sorted({e.type for e in due if e.lane == lane}))
        said = f"{count} of its effects in lane {lane} are due ({types})"
        if not able:
            yield _wait("capacity", f"{said}; no live worker takes that lane: start one")
        elif held := sum(worker.held for worker in able):
            yield _wait(
                "capacity", f"{said}; the workers of that lane ({len(able)}) hold {held} effects"
            )
        else:
            yield _wait("capacity", f"{said}; {able[0].id} is about to claim them")


def _horizon(facts: Facts) -> Iterator[WaitJson]:
    if facts.hidden:
        for holder in facts.holders:
            if holder.since_s >= OLD_HORIZON_S:
                yield _wait("horizon", f"the log is held back by {describe_holder(holder)}")


def _broker(facts: Facts) -> Iterator[WaitJson]:
    broker = facts.broker
    if broker is None or (broker.seen_s is not None and broker.seen_s < UNSEEN_S):
        return
    seen = "never" if broker.seen_s is None else f"last {_ago(broker.seen_s)}"
    yield _wait(
        "broker",
        f"Kafka does not answer (seen {seen}, {broker.behind} events to publish); until it does, events "
        "come from the log, which is slower",
    )


def _workers(facts: Facts) -> Iterator[WaitJson]:
    if not facts.workers:
        yield _wait("workers", "no worker has a live lease: headrace up starts them")


def _work_in_progress(facts: Facts) -> Iterator[WaitJson]:
    """Yield the work that is in progress: as what the run does, and with its worker where it is late."""
    known = {worker.id: worker for worker in facts.workers}
    held = [e for e in facts.effects if _is_held(e)]
    late = Counter((e.type, e.worker) for e in held if not _is_on_time(e))
    for (type_, id_), count in late.items():
        worker = known.get(id_ or "")
        where = f" (pid {worker.pid} on {worker.host})" if worker and worker.host else ""
        lease = min(e.lease_s or 0.0 for e in facts.effects if e.worker == id_)
        yield _wait(
            "effect",
            f"{id_}{where} performs {_effects(count, type_)} again; its lease ends in {lease:.0f} s "
            "unless it is renewed",
        )
    types = dict.fromkeys(e.type for e in held if _is_on_time(e))
    for words in dict.fromkeys(DOING.get(type_, f"performing {type_}") for type_ in types):
        step = facts.sampled
        if words == SAMPLING and step is not None:
            words = f"{words} step {step.step}: {step.graded} of {step.total}"
        yield _wait("effect", words)


def _decisions(facts: Facts) -> Iterator[WaitJson]:
    if facts.undecided:
        names = ", ".join(facts.undecided)
        yield _wait("decision", f"its last event has not been consumed by: {names}")


def _is_held(effect: EffectFact) -> bool:
    """Whether a live worker holds it."""
    return effect.worker is not None and (effect.lease_s or 0.0) > 0


def _is_on_time(effect: EffectFact) -> bool:
    """Whether a live worker holds it for the first time."""
    return _is_held(effect) and not effect.attempts and not effect.deaths


def _able(facts: Facts, lane: str) -> list[WorkerFact]:
    return [worker for worker in facts.workers if lane in worker.lanes]


def _distinct(effects: Iterable[EffectFact]) -> list[EffectFact]:
    """Return one effect of each type and worker."""
    return list({(effect.type, effect.worker): effect for effect in effects}.values())


def _effects(count: int, type_: str) -> str:
    return type_ if count == 1 else f"{count} {type_}"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.0f} h ago"


def _wait(what: What, message: str) -> WaitJson:
    return WaitJson(what=what, message=message)
