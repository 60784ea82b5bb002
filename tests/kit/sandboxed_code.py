"""User code of a test in sandboxes, without a platform."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from infra.blobs.artifacts import reference
from infra.repositories.git.mirrors import GitRepositories
from infra.sandbox.sandbox import LocalUserCode
from infra.settings.git import LAPTOP
from schemas.artifact_refs import ArtifactRef
from schemas.specs import CommitSpec, Entrypoint, RolloutRef
from tests.kit.platform import make_workspace

SNAPSHOT: list[bytes] = []
"""The snapshots of workspaces. The last one is that of the test that runs."""

COMMITTED: dict[tuple[tuple[str, str], ...], tuple[str, bytes]] = {}
"""The commit and the snapshot of each tree of files that this process has committed."""


async def fetch(_: ArtifactRef) -> bytes:
    return SNAPSHOT[-1]


async def store_rollout(directory: Path, files: Mapping[str, str], **fields: Any) -> RolloutRef:
    """The rollout `say` of a workspace with these files, whose limits are a second."""
    tree = tuple(sorted(files.items()))
    if tree not in COMMITTED:
        source = make_workspace(directory / "w", dict(files))
        repositories = GitRepositories(directory / "git", settings=LAPTOP)
        sha = await repositories.fetch("w", CommitSpec(url=str(source)))
        COMMITTED[tree] = sha, await repositories.snapshot("w", sha)
    sha, snapshot = COMMITTED[tree]
    SNAPSHOT.append(snapshot)
    return RolloutRef(
        snapshot=reference(snapshot),
        commit=sha,
        entrypoint=Entrypoint(rollout="say"),
        workflow="Do",
        grader="Check",
        workflow_timeout_s=1.0,
        grader_timeout_s=1.0,
        **fields,
    )


@asynccontextmanager
async def open_user_code(level: str) -> AsyncIterator[LocalUserCode]:
    """Sandboxes of a level, for the rollout that was stored last."""
    made = LocalUserCode(level, fetch=fetch)
    yield made
    await made.aclose()
