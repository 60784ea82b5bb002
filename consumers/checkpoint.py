"""Commits checkpoints.
Reads: CheckpointRequested.  Emits: CheckpointSaved, CheckpointFailed.  Stream: checkpoint.
Does: verifies the shards, puts the manifest last (lane: control).  Waits for: nothing.
Safe to repeat because: a manifest is a pure function of its step, and its put is create-only.

A run requests its checkpoints in the order of their steps, because each manifest names the hash of the
one before. So a request is a repeat if its step is not newer than the newest step that was answered. A
manifest that already exists is verified and adopted. It exists because the worker that stored it died
before it reported, or because two workers stored the same one.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import assert_never

from pydantic import ValidationError

from consumers.stored_files import verify_stored
from infra.failpoints import hit
from infra.ports.services import BlobExists, Blobs
from infra.spine.ports.artifacts import Artifacts
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from infra.spine.runtime.error_excerpt import excerpt
from schemas.artifact_refs import ArtifactRef
from schemas.effects import Failed, ManifestPut, SaveCheckpoint
from schemas.errors import CorruptData
from schemas.events import CheckpointFailed, CheckpointRequested, CheckpointSaved
from schemas.ids import ConsumerName, StreamName, checkpoint_stream
from schemas.sampling import Value
from schemas.specs import CheckpointSpec

FORMAT = 1
"""The version of the manifest's own format."""

CheckpointEvent = CheckpointSaved | CheckpointFailed
CheckpointMessage = CheckpointRequested | ManifestPut | Failed


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The newest step that was answered; -1 before the first."""

    answered: int = -1


def evolve(state: CheckpointState, event: CheckpointEvent) -> CheckpointState:
    """Return the state after one event of a checkpoint stream."""
    match event:
        case CheckpointSaved():
            return CheckpointState(max(state.answered, event.spec.step))
        case CheckpointFailed():
            return CheckpointState(max(state.answered, event.step))
        case _:
            assert_never(event)


def handle(state: CheckpointState, message: CheckpointMessage, meta: Meta) -> Decision:
    """Save each requested step once, or record once that it failed."""
    match message:
        case CheckpointRequested(spec=spec) if spec.step > state.answered:
            return Decision(effects=(SaveCheckpoint(spec=spec, reward=message.reward),))
        case ManifestPut(effect=effect) if effect.spec.step > state.answered:
            saved = CheckpointSaved(
                spec=effect.spec,
                manifest=message.manifest,
                reward=effect.reward,
                work=meta.work,
            )
            return Decision(events=(saved,))
        case Failed(effect=SaveCheckpoint(spec=spec)) if spec.step > state.answered:
            failed = CheckpointFailed(
                run=spec.run, step=spec.step, message=excerpt(message.message), work=meta.work
            )
            return Decision(events=(failed,))
        case _:
            return NOTHING


def routes(message: CheckpointMessage) -> tuple[StreamName, ...]:
    """A run's checkpoints share one stream."""
    return (checkpoint_stream(message.run),) if isinstance(message, CheckpointRequested) else ()


class Manifest(Value):
    """The manifest of a checkpoint: it names every file with its size and hash."""

    format: int
    files: dict[str, ArtifactRef]
    state: ArtifactRef | None


@dataclass(frozen=True, slots=True)
class CheckpointPorts:
    """The stores of files and of manifests."""

    artifacts: Artifacts
    blobs: Blobs


async def perform(effect: SaveCheckpoint, ports: CheckpointPorts) -> ManifestPut:
    """Verify the shards, then store the manifest. Returns where the manifest is stored. Raises
    CorruptData when a shard is not what was recorded."""
    spec = effect.spec
    await verify_stored([*_files(spec).values(), *_optional(spec.state.state)], ports.artifacts)
    hit("ckpt.shard")
    data = manifest_json(spec)
    hit("ckpt.before_manifest")
    data, uri = await _put_first(f"runs/{spec.run}/ckpt/{spec.step}/MANIFEST.json", data, ports)
    hit("ckpt.after_manifest")
    if data != manifest_json(spec):
        await _verify_other(uri, data, ports)
    manifest = ArtifactRef(uri=uri, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    hit("ckpt.before_event")
    return ManifestPut(effect=effect, manifest=manifest)


def manifest_json(spec: CheckpointSpec) -> bytes:
    """The manifest: canonical JSON, a pure function of the step. It holds no attempt, time or reward."""
    content = {
        "format": FORMAT,
        "run": spec.run,
        "step": spec.step,
        "policy_version": spec.state.step,
        "model": spec.model.model_dump(mode="json"),
        "tuning": spec.tuning,
        "files": {name: ref.model_dump() for name, ref in _files(spec).items()},
        "weights": spec.weights_name,
        "weights_sha256": spec.state.weights_sha256,
        "state": spec.state.state.model_dump() if spec.state.state else None,
        "state_sha256": spec.state.state_sha256,
        "batch": str(spec.batch) if spec.batch else None,
        "plan": list(spec.plan),
        "versions": spec.versions,
        "seed": spec.seed,
        "parent": spec.parent,
    }
    return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def _files(spec: CheckpointSpec) -> dict[str, ArtifactRef]:
    """The files of the checkpoint's directory. Raises CorruptData when its weights were not stored."""
    if spec.state.weights is None:
        raise CorruptData(
            f"the weights of step {spec.step} of {spec.run} were not stored, only their hash: a "
            "checkpoint needs a version that was stored whole"
        )
    return {**spec.files, spec.weights_name: spec.state.weights}


def _optional(ref: ArtifactRef | None) -> tuple[ArtifactRef, ...]:
    return () if ref is None else (ref,)


async def _put_first(key: str, data: bytes, ports: CheckpointPorts) -> tuple[bytes, str]:
    """Store the manifest unless one exists. Returns the bytes that are stored now, and their address."""
    try:
        return data, await ports.blobs.put_blob(key, data, create_only=True)
    except BlobExists:
        uri = await ports.blobs.exists(key)
    if uri is None:
        raise CorruptData(
            f"{key} existed and was deleted since; let nothing else delete files of checkpoints"
        )
    return await ports.blobs.get_blob(uri), uri


async def _verify_other(uri: str, data: bytes, ports: CheckpointPorts) -> None:
    """Check a manifest of this step that another worker stored first. It is kept if every byte that it
    names is there. Raises CorruptData otherwise."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise CorruptData(
            f"{uri} is not a manifest of Headrace: {error}; let nothing else write to these blobs"
        ) from error
    await verify_stored([*manifest.files.values(), *_optional(manifest.state)], ports.artifacts)


CONSUMER: Consumer[
    CheckpointState, CheckpointEvent, CheckpointMessage, SaveCheckpoint, CheckpointPorts
] = Consumer(
    name=ConsumerName("checkpoint"),
    category="checkpoint",
    reads=(CheckpointRequested,),
    emits=(CheckpointSaved, CheckpointFailed),
    effects=(SaveCheckpoint,),
    initial=CheckpointState(),
    evolve=evolve,
    handle=handle,
    routes=routes,
    perform=perform,
    ports=CheckpointPorts,
)
