"""Snapshots of workspaces with one rollout, made without git."""

import io
import tarfile

from infra.blobs.artifacts import reference
from schemas.specs import Entrypoint, RolloutRef


def snapshot_of(main: str) -> bytes:
    """The snapshot of a workspace whose only file is rollouts/say/main.py."""
    data = main.encode()
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            member = tarfile.TarInfo("rollouts/say/main.py")
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
        return buffer.getvalue()


def rollout_of(snapshot: bytes, *, timeout_s: float = 30) -> RolloutRef:
    """That rollout, with a workflow `Do` and a grader `Check`."""
    return RolloutRef(
        snapshot=reference(snapshot),
        commit="0" * 40,
        entrypoint=Entrypoint(rollout="say"),
        workflow="Do",
        grader="Check",
        workflow_timeout_s=timeout_s,
        grader_timeout_s=timeout_s,
    )
