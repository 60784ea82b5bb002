"""The deep inspection: compares the log, the artifacts and the manifests with each other, without a
learner.

It reads and hashes everything that the log names, as of one moment, while the platform keeps running. It
does not compute training steps again; `headrace train verify` does. Each kind of damage has a name.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from infra.blobs.installation import belong
from infra.blobs.installed import InstalledBlobs, install
from infra.blobs.references import PAGE, NamedArtifact, named_by
from infra.ports.services import Blobs
from infra.settings.settings import Settings
from infra.spine.ports.artifacts import ROW
from infra.spine.postgres.pool import administering, connect
from schemas.envelope import decode_event
from schemas.errors import CorruptData, HeadraceError, NotFound
from schemas.events import CheckpointSaved
from schemas.specs import CheckpointSpec

STREAMS = """
select coalesce(s.stream, e.stream) as stream, coalesce(s.version, 0) as head,
       coalesce(e.versions, '{}') as versions, coalesce(t.version, 0) as trimmed
from (select stream, array_agg(version order by version) as versions from events group by stream) e
full join streams s on s.stream = e.stream
left join trimmed_streams t on t.stream = s.stream
where s.version is distinct from coalesce(cardinality(e.versions), 0)
   or e.versions[1] <> 1 or e.versions[cardinality(e.versions)] <> cardinality(e.versions)
   or exists (select from unnest(e.versions) v group by v having count(*) > 1)
order by 1
"""

EVENTS = """
select stream, version, type, schema_version, data from events order by xid, position
"""


class Kind(StrEnum):
    """The kinds of damage."""

    MISSING_EVENT = "missing-event"
    DOUBLED_EVENT = "doubled-event"
    WRONG_HEAD = "wrong-head"
    UNREADABLE_EVENT = "unreadable-event"
    MISSING_ROW = "missing-row"
    DAMAGED_ROW = "damaged-row"
    MISSING_BLOB = "missing-blob"
    DAMAGED_BLOB = "damaged-blob"
    FOREIGN_NAME = "foreign-name"
    WRONG_MANIFEST = "wrong-manifest"
    WRONG_PARENT = "wrong-parent"


@dataclass(frozen=True, slots=True)
class Damage:
    """A difference from what the log says. `what` names the event, row or blob."""

    kind: Kind
    what: str
    message: str


@dataclass
class Inspection:
    """The result of an inspection: counts of what was read, and the damage."""

    events: int = 0
    rows: int = 0
    blobs: int = 0
    manifests: int = 0
    damages: list[Damage] = field(default_factory=list)

    def add(self, kind: Kind, what: str, message: str) -> None:
        self.damages.append(Damage(kind, what, message))


@dataclass
class _Recorded:
    """The facts of the log that the checks look up."""

    rows: dict[str, NamedArtifact] = field(default_factory=dict)
    blobs: dict[str, NamedArtifact] = field(default_factory=dict)
    saved: dict[str, list[CheckpointSaved]] = field(default_factory=lambda: defaultdict(list))


async def inspect(url: str, store: Blobs, settings: Settings) -> Inspection:
    """Inspect the database at `url` and the blobs in `store`, and return what was found. Raises Conflict
    when they do not belong to the same installation, TransientError when one does not answer."""
    found, recorded = Inspection(), _Recorded()
    async with administering(url) as admin, connect(url, size=1) as database:
        await belong(database, store, settings)
        blobs = await install(store, database)
        async with admin.transaction(isolation="repeatable_read", readonly=True):
            await _streams(admin, found)
            await _events(admin, recorded, found)
            await _rows(admin, recorded.rows, found)
        for named in recorded.blobs.values():
            await _blob(named, blobs, found)
        for saved in recorded.saved.values():
            await _manifests(saved, blobs, found)
    return found


async def _streams(admin: Any, found: Inspection) -> None:
    """Check that each stream has every version exactly once, up to its head. Where old events were
    removed, the versions among them may be missing."""
    for row in await admin.fetch(STREAMS):
        stream, versions, head = row["stream"], row["versions"], row["head"]
        last = max([head, *versions])
        for version in sorted(set(range(row["trimmed"] + 1, last + 1)) - set(versions)):
            found.add(Kind.MISSING_EVENT, f"{stream}/{version}", "the stream has no such event")
        for version in sorted({v for v in versions if versions.count(v) > 1}):
            found.add(Kind.DOUBLED_EVENT, f"{stream}/{version}", "the stream has it twice")
        if versions and head < last:
            message = f"its head says {head}; it has {last}: nothing can be appended"
            found.add(Kind.WRONG_HEAD, stream, message)


async def _events(admin: Any, recorded: _Recorded, found: Inspection) -> None:
    """Check that each event can be read, and record the artifacts that it names."""
    async for row in admin.cursor(EVENTS, prefetch=PAGE):
        found.events += 1
        by = f"{row['stream']}/{row['version']}"
        try:
            event = decode_event(row["type"], row["schema_version"], row["data"])
        except HeadraceError as error:
            found.add(Kind.UNREADABLE_EVENT, by, str(error))
            continue
        for named in named_by(event, by):
            known = recorded.rows if named.ref.uri.startswith(ROW) else recorded.blobs
            if named.needed or named.ref.uri not in known:
                known[named.ref.uri] = named
        if isinstance(event, CheckpointSaved):
            recorded.saved[event.spec.run].append(event)


async def _rows(admin: Any, rows: Mapping[str, NamedArtifact], found: Inspection) -> None:
    """Check that each small artifact that the log names exists, and that every row has the hash that is
    its name."""
    kept = await admin.fetch(
        "select sha256, octet_length(data) as size, encode(sha256(data), 'hex') = sha256 as good"
        " from artifacts"
    )
    found.rows = len(kept)
    sizes = {row["sha256"]: row["size"] for row in kept}
    for row in kept:
        if not row["good"]:
            found.add(Kind.DAMAGED_ROW, ROW + row["sha256"], "it does not hold what was recorded")
    for named in rows.values():
        size = sizes.get(named.ref.sha256)
        if size is None:
            found.add(Kind.MISSING_ROW, named.ref.uri, f"it is gone; {named.by} names it")
        elif size != named.ref.size:
            message = f"it has {size} bytes; {named.by} says {named.ref.size}"
            found.add(Kind.DAMAGED_ROW, named.ref.uri, message)


async def _blob(named: NamedArtifact, blobs: InstalledBlobs, found: Inspection) -> None:
    uri = named.ref.uri
    if await blobs.key(uri) is None:
        found.add(Kind.FOREIGN_NAME, uri, f"it is not in our blobs; {named.by} names it")
        return
    try:
        size, sha256 = await _hash(blobs, uri)
    except NotFound:
        if named.needed:
            found.add(Kind.MISSING_BLOB, uri, f"it is gone; {named.by} names it")
        return
    except CorruptData as error:
        found.add(Kind.DAMAGED_BLOB, uri, f"{error}; {named.by} names it")
        return
    found.blobs += 1
    if (size, sha256) != (named.ref.size, named.ref.sha256):
        message = f"it does not hold the {named.ref.size} bytes that {named.by} names"
        found.add(Kind.DAMAGED_BLOB, uri, message)


async def _hash(blobs: Blobs, uri: str) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    async for piece in blobs.chunks(uri):
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()


async def _manifests(
    saved: Iterable[CheckpointSaved], blobs: InstalledBlobs, found: Inspection
) -> None:
    """Check the manifests of a run, in the order of its log. Each must agree with the log about its own
    step and name the previous manifest as its parent."""
    parent: str | None = None
    for event in saved:
        uri = event.manifest.uri
        if event.spec.parent != parent:
            message = f"the checkpoint of step {event.spec.step} names another one as its parent"
            found.add(Kind.WRONG_PARENT, uri, message)
        parent = event.manifest.sha256
        try:
            data = await blobs.get_blob(uri)
        except (NotFound, CorruptData):
            continue  # already reported as damage of the blob
        if hashlib.sha256(data).hexdigest() != event.manifest.sha256:
            continue
        found.manifests += 1
        for key in _disagreeing(event.spec, data):
            message = f"its `{key}` is not what the log says of step {event.spec.step}"
            found.add(Kind.WRONG_MANIFEST, uri, message)


def _disagreeing(spec: CheckpointSpec, data: bytes) -> list[str]:
    """The keys of a manifest whose values differ from the log."""
    try:
        manifest = json.loads(data)
    except ValueError:
        return ["format"]
    weights = {} if spec.state.weights is None else {spec.weights_name: spec.state.weights}
    files = {name: ref.model_dump() for name, ref in (spec.files | weights).items()}
    expected = {
        "run": spec.run,
        "step": spec.step,
        "policy_version": spec.state.step,
        "files": files,
        "weights_sha256": spec.state.weights_sha256,
        "state": spec.state.state.model_dump() if spec.state.state else None,
        "state_sha256": spec.state.state_sha256,
        "parent": spec.parent,
    }
    return [key for key, value in expected.items() if manifest.get(key) != value]
