"""Uploads of dataset files. A file is checked in a confined process, normalised, stored and registered.

A name is unique within its scope: the workspace of the API key that uploads, or else the organisation.
A dataset's id is derived from both, and so is the cause of the event of each version. A version
therefore has one content, even when several users upload at the same time.
"""

import asyncio
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from infra.blobs.staged_uploads import NameTaken
from infra.names import Names, several_error
from infra.ports.actor import (
    MAIN,
    key_workspace,
    may_use_dataset,
    own_organisation,
    visible_organisation,
    visible_workspaces,
)
from infra.ports.services import Blobs
from infra.spine.ports.event_log import EventStore, Recorded
from producers.core.datasets.confined_check import MAX_FILE_BYTES
from producers.core.datasets.readers import FORMATS, PARQUET
from producers.core.datasets.row_issues import ISSUES
from producers.core.datasets.rules import FileReport
from producers.core.datasets.versions import (
    DatasetVersion,
    Versions,
    load_versions,
    name_of_version,
    split_version,
    version_id,
)
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetOrigin
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import DatasetDeleted, DatasetRegistered
from schemas.ids import HEADRACE, DatasetId, dataset_stream, derive_id, is_id, short_id
from schemas.specs import DatasetRef
from schemas.toml.generated_tasks import dataset_name, how_to_generate, is_generated

MEMORY_BYTES = 1 << 30
WALL_S = 600
CHUNK_BYTES = 1 << 20
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class UploadDropped(Conflict):
    """An upload was deleted, or given to another process, while its file was checked."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that was read: what is wrong with it, or the path of its normalised form."""

    report: FileReport
    normalised: Path


@dataclass(frozen=True, slots=True)
class DatasetKey:
    """The key of a new dataset: its name, the scope in which the name is unique, and the id that
    follows from both."""

    name: str
    scope: str
    id: DatasetId

    @property
    def cause(self) -> str:
        """The text from which the causes of its registrations are derived."""
        if self.id == dataset_id(self.name):
            return f"dataset/{self.name}"
        return f"dataset/{self.scope}/{self.name}"


def dataset_id(name: str) -> DatasetId:
    """The id of a dataset that all of the organisation `main` share, and of one from before there were
    organisations."""
    return DatasetId(short_id("dataset", name))


async def dataset_key(names: Names, name: str) -> DatasetKey:
    """The key of a dataset that the sender uploads under this name."""
    scope = key_workspace() or own_organisation()
    held = await names.find_id("dataset", name, scope=scope)
    if held is not None:
        return DatasetKey(name, scope, DatasetId(held))
    if scope == MAIN:
        identity = dataset_id(name)
        holders = await names.find_holders("dataset", name)
        if all(taken.id != identity for taken in holders):
            return DatasetKey(name, scope, identity)
        # A dataset of a workspace has this id from before there were organisations.
    return DatasetKey(name, scope, DatasetId(short_id("dataset", f"{scope}/{name}")))


def check_name(name: str) -> None:
    """Raises InvalidConfig when a dataset cannot have this name."""
    if not NAME.fullmatch(name):
        raise InvalidConfig(
            f"{name!r} cannot name a dataset; use letters, digits, '.', '_' and '-', at most 128",
            issues=(Issue("name", f"must be letters, digits, '.', '_' and '-', got {name!r}"),),
        )
    if is_id(name):
        message = f"{name} could be the id of another dataset; choose another name"
        raise InvalidConfig(message, issues=(Issue("name", message),))


def file_kind(file_name: str) -> str:
    """The file's format, jsonl, csv or parquet, by its ending. Raises InvalidConfig for any other, and
    for Parquet where this server cannot read it."""
    suffix = Path(file_name).suffix.lower()
    if suffix in FORMATS:
        return FORMATS[suffix]
    hint = "use .jsonl, .csv or .parquet"
    if suffix == ".parquet":
        if importlib.util.find_spec("pyarrow") is not None:
            return PARQUET
        hint = (
            "convert it to JSON Lines, as `headrace dataset upload` does, or install "
            "headrace[parquet] on the server"
        )
    message = f"{file_name} cannot be read, because its ending is {suffix or 'missing'}; {hint}"
    raise InvalidConfig(message, issues=(Issue("file_name", message),))


@asynccontextmanager
async def receive_upload(body: AsyncIterator[bytes], directory: Path) -> AsyncIterator[Path]:
    """Write the body to a temporary file in `directory`, which is removed afterwards. Raises
    InvalidConfig when it is larger than a dataset may be."""
    await asyncio.to_thread(directory.mkdir, mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=directory)
    size = 0
    try:
        with os.fdopen(handle, "wb") as file:
            async for chunk in body:
                size += len(chunk)
                if size > MAX_FILE_BYTES:
                    raise InvalidConfig(
                        f"the file has more than {MAX_FILE_BYTES >> 20} MiB; split it",
                        issues=(
                            Issue(
                                "file", f"must have at most {MAX_FILE_BYTES >> 20} MiB; split it"
                            ),
                        ),
                    )
                file.write(chunk)
        yield Path(name)
    finally:
        await asyncio.to_thread(_delete_upload, Path(name))


async def check(
    path: Path,
    kind: str,
    *,
    memory_bytes: int = MEMORY_BYTES,
    mapping: Mapping[str, str] | None = None,
    out: Path | None = None,
) -> Checked:
    """Read a file in a confined process (`producers/core/datasets/confined_check.py`). If it cannot be
    read within the limits, that is reported as a problem of the file. `mapping` renames columns
    (`producers/core/datasets/mapping.py`). The rows are written to `out`, or beside the file."""
    out = out or path.with_suffix(".rows")
    scale = max(1, -(-(await asyncio.to_thread(path.stat)).st_size // MAX_FILE_BYTES))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "producers.core.datasets.confined_check",
        str(path),
        kind,
        str(out),
        str(memory_bytes),
        json.dumps(dict(mapping or {})),
        str(scale),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"},
    )
    try:
        async with asyncio.timeout(scale * WALL_S):
            printed, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        broken = FileReport()
        broken.add(
            "file", "cannot be read within the limits on memory and time; split it or simplify it"
        )
        return Checked(broken, out)
    return Checked(_parse_report(printed), out)


async def register(
    checked: Checked,
    original: Path,
    *,
    name: str,
    file_name: str,
    log: EventStore,
    blobs: Blobs,
    names: Names,
    mapping: Mapping[str, str] | None = None,
    overwrites: bool = False,
    sha256: str | None = None,
    is_wanted: Callable[[], Awaitable[bool]] | None = None,
    origin: DatasetOrigin | None = None,
) -> Recorded:
    """Store both forms and append DatasetRegistered. The same content as that of the newest version is
    the same version. Other content makes the next version if the upload `overwrites`. Raises
    InvalidConfig with the issues of the file or when it does not have the `sha256` that its sender
    named, and Conflict when the name belongs to another dataset or has other content. `is_wanted` is
    asked before the event is appended; UploadDropped is raised when it says no. `origin` is the run
    whose samples the rows are."""
    if checked.report.issues:
        raise refusal(file_name, checked.report)
    sent = await _digest_of(original)
    if sha256 not in (None, sent.sha256):
        message = f"has the sha256 {sent.sha256}, and not {str(sha256)[:80]} as was announced"
        raise InvalidConfig(f"{file_name} {message}; upload it again", issues=())
    key = await dataset_key(names, name)
    content = await _digest_of(checked.normalised)
    existing = same_content(await load_versions(log, key.id), name, content, overwrites=overwrites)
    if existing is not None:
        return existing
    content = await _store(checked.normalised, content, blobs)
    raw = await _store(original, sent, blobs)
    series = DatasetId(await names.take("dataset", name, key.id, scope=key.scope))
    key = DatasetKey(name, key.scope, series)
    while True:
        versions = await load_versions(log, series)
        existing = same_content(versions, name, content, overwrites=overwrites)
        if existing is not None:
            return existing
        number = versions.next_number
        event = DatasetRegistered(
            dataset=DatasetRef(
                dataset=version_id(series, number),
                name=name,
                content=content,
                num_rows=checked.report.num_rows,
                version=number,
            ),
            columns=checked.report.columns,
            file_name=file_name,
            file_size=raw.size,
            original=raw,
            mapping=dict(mapping or {}),
            characters=checked.report.characters,
            workspace=key_workspace(),
            organisation=None if own_organisation() == MAIN else own_organisation(),
            series=None if number == 1 else series,
            origin=origin,
        )
        if is_wanted is not None and not await is_wanted():
            raise UploadDropped(f"upload of {file_name} is not wanted any more; begin another one")
        [recorded] = await log.append([event], cause=await _find_cause(log, key, event))
        registered = recorded.event
        if (
            isinstance(registered, DatasetRegistered)
            and may_use(registered)
            and registered.dataset.content.sha256 == content.sha256
        ):
            return recorded  # or else another upload was faster


def same_content(
    versions: Versions, name: str, content: ArtifactRef, *, overwrites: bool
) -> Recorded | None:
    """The newest version if it has this content; None when the content may become a version. Raises
    NameTaken when the name belongs to another dataset, or has other content that is not overwritten."""
    newest = versions.newest
    if newest is None:
        return None
    if not may_use(newest.event):
        raise used_name(name)
    if newest.event.dataset.content.sha256 == content.sha256:
        return newest.recorded
    if not overwrites:
        raise existing_dataset(newest)
    return None


def existing_dataset(newest: DatasetVersion) -> NameTaken:
    """The error for a name that has other content."""
    ref = newest.event.dataset
    return NameTaken(
        f"dataset {ref.name} exists with other content ({ref.num_rows} rows, sha256 "
        f"{ref.content.sha256[:12]}, id {ref.dataset}); upload it as the next version with --overwrite, "
        f"or under another name, like {ref.name}-2",
        holder=ref.dataset,
    )


def used_name(name: str) -> NameTaken:
    """The error for a name of a dataset that the sender of the request may not see."""
    return NameTaken(
        f"the name {name} is already used by another dataset; choose another name", holder=None
    )


async def _find_cause(log: EventStore, key: DatasetKey, event: DatasetRegistered) -> UUID:
    """The cause of a registration under this key. Each deletion of the version changes it."""
    label = name_of_version(key.cause, event.dataset.version)
    for recorded in (await log.load({event.stream: 0}))[event.stream]:
        if isinstance(recorded.event, DatasetDeleted):
            return derive_id(HEADRACE, f"{label}/{recorded.id}")
    return derive_id(HEADRACE, label)


def may_use(event: DatasetRegistered) -> bool:
    """Whether the sender of the request may use a version of a dataset."""
    return may_use_dataset(event.workspace, event.organisation)


async def find(
    log: EventStore, names: Names, ref: str, *, workspace: str | None = None
) -> DatasetRegistered:
    """A registered dataset by name or id, as `registration` finds it."""
    return (await registration(log, names, ref, workspace=workspace))[1]


async def dataset_ids(
    names: Names, name: str, *, workspace: str | None = None
) -> tuple[Sequence[str], Sequence[str]]:
    """The ids of the datasets with this name in the nearest scope, the workspace of the request (its id,
    or that of the API key), and those in all scopes that the sender may see."""
    visible, organisation = visible_workspaces(), visible_organisation()
    scopes = None if visible is None else [*visible, organisation or MAIN, ""]
    holders = await names.find_holders("dataset", name, scopes=scopes)
    near = workspace or key_workspace()
    nearest = [taken.id for taken in holders if near is not None and taken.scope == near]
    return nearest, [taken.id for taken in holders]


async def registration(
    log: EventStore, names: Names, ref: str, *, workspace: str | None = None
) -> tuple[Recorded, DatasetRegistered]:
    """The event that registered a version of a dataset, by its id, by name, or by what it was
    generated from. A name means the newest version of the dataset of the request's workspace (its id,
    or that of the API key), and else of a shared one. NAME@2 means the second version. Raises
    NotFound, Conflict when several have the name, and InvalidConfig for a name that does not say how
    to generate it."""
    name, number = split_version(dataset_name(ref))
    nearest, known = await dataset_ids(names, name, workspace=workspace)
    there: list[str] = []
    for ids in (nearest, known or [dataset_id(name)]):
        found = []
        for identity in dict.fromkeys(ids):
            versions = await load_versions(log, identity)
            usable = [one for one in versions.found if may_use(one.event)]
            there = [str(one.number) for one in usable] or there
            found += [one for one in usable if number in (None, one.number)][-1:]
        if len(found) > 1:
            places = [(one.event.dataset.dataset, _place(one.event)) for one in found]
            raise several_error("dataset", ref, places)
        if found:
            return found[0].recorded, found[0].event
    stream = dataset_stream(ref)
    for recorded in (await log.load({stream: 0}))[stream]:
        event = recorded.event
        if isinstance(event, DatasetRegistered) and may_use(event):
            return recorded, event
    if there:
        listed = ", ".join(there[-20:])
        raise NotFound(f"dataset {name} has no version {number}; it has {listed}")
    upload = f"`headrace dataset upload FILE --name {ref}` makes one"
    how = how_to_generate(ref) if is_generated(ref) else upload
    raise NotFound(f"there is no dataset {ref!r}; {how}")


def _place(event: DatasetRegistered) -> str:
    return f"workspace {event.workspace}" if event.workspace is not None else "shared"


def refusal(file_name: str, report: FileReport) -> InvalidConfig:
    """The error that lists the first problems of a file."""
    first, *_ = issues = tuple(issue.for_text() for issue in report.issues)
    message = f"{file_name} cannot be a dataset: {first.key} {first.message}"
    return InvalidConfig(message, issues=issues)


async def _digest_of(path: Path) -> ArtifactRef:
    """The content of a file, before it is stored."""
    sha256, size = await asyncio.to_thread(_digest, path)
    return ArtifactRef(uri="", sha256=sha256, size=size)


async def _store(path: Path, found: ArtifactRef, blobs: Blobs) -> ArtifactRef:
    uri = await blobs.put_file(f"datasets/{found.sha256}", path)
    return found.model_copy(update={"uri": uri})


def _delete_upload(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.with_suffix(".rows").unlink(missing_ok=True)


def _digest(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _parse_report(printed: bytes) -> FileReport:
    report_json = json.loads(printed)
    return FileReport(
        num_rows=int(report_json["num_rows"]),
        columns=tuple(report_json["columns"]),
        issues=ISSUES.validate_python(report_json["issues"]),
        characters=str(report_json["characters"]),
    )
