"""Stores and reads the files of effects, as artifacts."""

import asyncio
from collections.abc import Iterable, Mapping

from infra.ports.services import UserOutput
from infra.spine.ports.artifacts import Artifacts
from schemas.artifact_refs import ArtifactRef
from schemas.sampling import SampleOutput


async def store_output(left: UserOutput, artifacts: Artifacts, *, run: str) -> SampleOutput:
    """Store the files that a call of user code left behind. Returns its output, which refers to them."""
    files = {name: await artifacts.put_artifact(data, run=run) for name, data in left.files.items()}
    return SampleOutput(
        stdout=left.stdout, traceback=left.traceback, files=files, is_cut=left.is_cut
    )


async def store_shared(
    files: Mapping[str, bytes], artifacts: Artifacts, *, run: str
) -> dict[str, ArtifactRef]:
    """Store files that other runs may have too, and return their references by name. All at once,
    because each is many short calls of a file system or of a store."""
    stored = await asyncio.gather(
        *(artifacts.put_artifact(data, run=run, blob=True, shared=True) for data in files.values())
    )
    return dict(zip(files, stored, strict=True))


async def verify_stored(refs: Iterable[ArtifactRef], artifacts: Artifacts) -> None:
    """Read artifacts from the place where they will be read later, without caches. Raises CorruptData
    when one is not what was recorded."""
    await asyncio.gather(*(artifacts.get_artifact(ref, cached=False) for ref in refs))
