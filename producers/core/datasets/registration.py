"""Uploads of dataset files. A file is checked in a confined process, normalised, stored and registered.

A dataset's id is derived from its name, and so is the cause of its one event. One name therefore
means one content, even when several users upload at the same time.
"""

import asyncio
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from infra.names import Names
from infra.ports.actor import bound_workspace, may_see, may_use_dataset
from infra.ports.services import Blobs
from infra.spine.ports.event_log import EventStore, Recorded
from producers.core.datasets.confined_check import MAX_FILE_BYTES
from producers.core.datasets.readers import FORMATS
from producers.core.datasets.row_issues import ISSUES
from producers.core.datasets.rules import FileReport
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import DatasetDeleted, DatasetRegistered
from schemas.generated_tasks import dataset_name, how_to_generate, is_generated
from schemas.ids import HEADRACE, DatasetId, dataset_stream, derive_id, is_id, short_id
from schemas.specs import DatasetRef

MEMORY_BYTES = 1 << 30
WALL_S = 600
CHUNK_BYTES = 1 << 20
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


@dataclass(frozen=True, slots=True)
class Checked:
    """A file that was read: what is wrong with it, or the path of its normalised form."""

    report: FileReport
    normalised: Path


def dataset_id(name: str) -> DatasetId:
    return DatasetId(short_id("dataset", name))


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
    """The file's format, jsonl or csv, by its ending. Raises InvalidConfig for any other."""
    suffix = Path(file_name).suffix.lower()
    if suffix in FORMATS:
        return FORMATS[suffix]
    hint = "use .jsonl or .csv"
    if suffix == ".parquet":
        hint = "convert it to JSON Lines, as `headrace dataset upload` does"
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
) -> Checked:
    """Read a file in a confined process (`producers/core/datasets/confined_check.py`). If it cannot be
    read within the limits, that is reported as a problem of the file. `mapping` renames columns
    (`producers/core/datasets/mapping.py`)."""
    out = path.with_suffix(".rows")
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "producers.core.datasets.confined_check",
        str(path),
        kind,
        str(out),
        str(memory_bytes),
        json.dumps(dict(mapping or {})),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"},
    )
    try:
        async with asyncio.timeout(WALL_S):
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
) -> Recorded:
    """Store both forms and append DatasetRegistered. The same content under the same name is the same
    dataset. Raises InvalidConfig with the issues of the file, and Conflict when the name belongs to a
    dataset with other content."""
    if checked.report.issues:
        raise refusal(file_name, checked.report)
    identity = dataset_id(name)
    content = await _store(checked.normalised, blobs)
    raw = await _store(original, blobs)
    event = DatasetRegistered(
        dataset=DatasetRef(
            dataset=identity, name=name, content=content, num_rows=checked.report.num_rows
        ),
        columns=checked.report.columns,
        file_name=file_name,
        file_size=raw.size,
        original=raw,
        mapping=dict(mapping or {}),
        characters=checked.report.characters,
        workspace=bound_workspace(),
    )
    await names.take("dataset", name, identity)
    [recorded] = await log.append([event], cause=await _find_cause(log, name))
    registered = recorded.event
    if isinstance(registered, DatasetRegistered) and not may_see(registered.workspace):
        raise Conflict(f"the name {name} is already used by another dataset; choose another name")
    if isinstance(registered, DatasetRegistered) and registered.dataset.content != content:
        raise Conflict(
            f"dataset {name} exists with other content ({registered.dataset.num_rows} rows, sha256 "
            f"{registered.dataset.content.sha256[:12]}); upload under another name, like {name}-2"
        )
    return recorded


async def _find_cause(log: EventStore, name: str) -> UUID:
    """The cause of a registration under this name. Each deletion of a dataset with this name changes
    it."""
    stream = dataset_stream(dataset_id(name))
    for recorded in (await log.load({stream: 0}))[stream]:
        if isinstance(recorded.event, DatasetDeleted):
            return derive_id(HEADRACE, f"dataset/{name}/{recorded.id}")
    return derive_id(HEADRACE, f"dataset/{name}")


async def find(log: EventStore, ref: str) -> DatasetRegistered:
    """A registered dataset by name or id. Raises NotFound."""
    return (await registration(log, ref))[1]


async def registration(log: EventStore, ref: str) -> tuple[Recorded, DatasetRegistered]:
    """The event that registered a dataset, by name or id, or by what it was generated from. Raises
    NotFound, and InvalidConfig for a name that does not say how to generate it."""
    streams = [dataset_stream(dataset_id(dataset_name(ref))), dataset_stream(ref)]
    loaded = await log.load(dict.fromkeys(streams, 0))
    for stream in streams:
        for recorded in loaded[stream]:
            event = recorded.event
            if isinstance(event, DatasetRegistered) and may_use_dataset(event.workspace):
                return recorded, event
    upload = f"`headrace dataset upload FILE --name {ref}` makes one"
    how = how_to_generate(ref) if is_generated(ref) else upload
    raise NotFound(f"there is no dataset {ref!r}; {how}")


def refusal(file_name: str, report: FileReport) -> InvalidConfig:
    """The error that lists the first problems of a file."""
    first, *_ = issues = tuple(issue.for_text() for issue in report.issues)
    message = f"{file_name} cannot be a dataset: {first.key} {first.message}"
    return InvalidConfig(message, issues=issues)


async def _store(path: Path, blobs: Blobs) -> ArtifactRef:
    sha256, size = await asyncio.to_thread(_digest, path)
    uri = await blobs.put_file(f"datasets/{sha256}", path)
    return ArtifactRef(uri=uri, sha256=sha256, size=size)


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
