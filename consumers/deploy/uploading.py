"""The upload of a checkpoint: its files are verified, merged if that is asked for, and committed with a
model card and `headrace.json`, which holds the hashes."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.failpoints import hit
from infra.ports.hub import HubCommit, ModelHub, PreparedUpload
from infra.ports.secrets import SecretStore
from infra.settings.settings import Settings
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import EventStore
from schemas.deployments import HubUpload
from schemas.errors import NotFound, Refused
from schemas.events import CheckpointSaved
from schemas.ids import checkpoint_stream
from schemas.secrets.rules import how_to_set
from schemas.secrets.secret_value import SecretValue
from schemas.specs import CheckpointSpec
from schemas.text import plain

MERGE_S = 2 * 3600.0
RECORD = "headrace.json"
"""The file that says where a model comes from. A repository without it was not made by Headrace."""


@dataclass(frozen=True, slots=True)
class UploadPorts:
    """The hub, the secrets with its tokens, and the files of checkpoints."""

    hub: ModelHub
    secrets: SecretStore
    artifacts: Artifacts
    log: EventStore
    settings: Settings


async def upload_checkpoint(upload: HubUpload, ports: UploadPorts) -> HubCommit:
    """Upload a checkpoint, and return its commit. Raises Refused and HubAway."""
    token = await _token(upload, ports)
    saved = await _checkpoint(upload, ports)
    async with _scratch(ports.settings.home / "hub" / upload.upload) as place:
        directory = await _prepare(upload, saved.spec, place, ports)
        files = await asyncio.to_thread(_hashes, directory)
        record = _record(upload, saved, files)
        (directory / "README.md").write_text(upload.card)
        (directory / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        hit("hub.prepared")
        wanted = PreparedUpload(
            id=upload.upload,
            directory=directory,
            repository=upload.repository,
            private=upload.private,
            title=f"Upload {upload.ref}",
        )
        found = await ports.hub.upload(wanted, token)
        hit("hub.committed")
        return found


async def _token(upload: HubUpload, ports: UploadPorts) -> SecretValue:
    """The token of the hub, as it is now. Raises Refused when it is not set."""
    names = (upload.secret,)
    values = await ports.secrets.resolve(
        names, workspace=upload.workspace, submitter=upload.submitter
    )
    if upload.secret not in values:
        raise Refused(how_to_set(names, pushed=upload.submitter is None))
    return values[upload.secret]


async def _checkpoint(upload: HubUpload, ports: UploadPorts) -> CheckpointSaved:
    """The event that saved the checkpoint. Raises NotFound when its run was deleted."""
    stream = checkpoint_stream(upload.run)
    for recorded in (await ports.log.load({stream: 0}))[stream]:
        event = recorded.event
        if isinstance(event, CheckpointSaved) and event.spec.step == upload.step:
            return event
    raise NotFound(f"{upload.ref} does not exist any more; upload another checkpoint")


@asynccontextmanager
async def _scratch(place: Path) -> AsyncIterator[Path]:
    """An empty directory that is deleted after the block. A worker that died may have left it."""
    await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
    await asyncio.to_thread(place.mkdir, parents=True, mode=0o700)
    try:
        yield place
    finally:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


async def _prepare(
    upload: HubUpload, spec: CheckpointSpec, place: Path, ports: UploadPorts
) -> Path:
    """Write the files that are uploaded, each verified against its hash. Returns their directory."""
    adapter = place / "checkpoint"
    weights = spec.state.weights
    refs = {**spec.files, **({spec.weights_name: weights} if weights else {})}
    for name, ref in refs.items():
        path = adapter / name
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(
            path.write_bytes, await ports.artifacts.get_artifact(ref, cached=False)
        )
    if upload.form != "merged":
        return adapter
    merged = place / "merged"
    await _merge(adapter, merged, dtype=spec.model.dtype)
    return merged


async def _merge(adapter: Path, merged: Path, *, dtype: str) -> None:
    """Add the adapter to its base model, in a process of its own. Raises Refused with its last line."""
    program = (sys.executable, "-P", "-m", "trainer.model.merge", str(adapter), str(merged))
    hidden = ("HEADRACE_", "AWS_", "PG")
    child = await asyncio.create_subprocess_exec(
        *program,
        "--dtype",
        dtype,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        async with asyncio.timeout(MERGE_S):
            _, said = await child.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0:
        lines = said.decode(errors="replace").strip().splitlines()
        why = plain(lines[-1])[:500] if lines else f"exit code {child.returncode}"
        raise Refused(
            f"the adapter cannot be merged into its base: {why}; upload it without --merged"
        )


def _hashes(directory: Path) -> Mapping[str, str]:
    """The SHA-256 of each file, by its path in the directory."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(directory).as_posix()] = digest
    return found


def _record(
    upload: HubUpload, saved: CheckpointSaved, files: Mapping[str, str]
) -> Mapping[str, object]:
    spec = saved.spec
    return {
        "upload": upload.upload,
        "run": upload.run,
        "checkpoint": upload.ref,
        "step": upload.step,
        "form": upload.form,
        "base_model": {"kind": spec.model.kind, "dtype": spec.model.dtype},
        "manifest_sha256": saved.manifest.sha256,
        "weights_sha256": saved.adapter_sha256,
        "files": dict(files),
    }
