"""Stores the bytes of policy versions, and discards them once nothing needs them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from infra.spine.ports.artifacts import Artifacts
from schemas.artifact_refs import ArtifactRef
from schemas.learner import LearnerState
from schemas.specs import StateRef


async def store_version(
    version: LearnerState, artifacts: Artifacts, run: str, *, step: int
) -> StateRef:
    """Store the bytes of a version that were exported. Returns its reference, which always has the
    hashes. Runs that begin alike share version 0."""

    async def put(data: bytes | None, sha256: str | None) -> ArtifactRef | None:
        if data is None:
            return None
        return await artifacts.put_artifact(
            data, run=run, blob=True, sha256=sha256, shared=step == 0
        )

    weights_ref, state_ref = await asyncio.gather(
        put(version.weights, version.weights_file_sha256),
        put(version.state, version.state_file_sha256),
    )
    return StateRef(
        step=step,
        weights_sha256=version.weights_sha256,
        state_sha256=version.state_sha256,
        weights=weights_ref,
        state=state_ref,
    )


@asynccontextmanager
async def discarding(retired: Sequence[ArtifactRef], artifacts: Artifacts) -> AsyncIterator[None]:
    """Discard these artifacts while the block runs. The work in the block does not need them, whether it
    succeeds or not. If it fails, the next attempt discards what is left."""
    discards = asyncio.gather(*(artifacts.discard(ref) for ref in retired))
    try:
        yield
        await discards
    finally:
        discards.cancel()
        await asyncio.gather(discards, return_exceptions=True)
