"""The port to artifacts: content-addressed bytes, which events and effects name by an ArtifactRef."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.artifact_refs import ArtifactRef

ROW = "row:"
"""How the uri of an artifact begins whose bytes are a row of the log."""


@dataclass(frozen=True, slots=True)
class SmallArtifact:
    """An artifact of at most 64 KiB that is written as a row, with the event that refers to it."""

    sha256: str
    data: bytes


class Artifacts(Protocol):
    """Content-addressed bytes: small ones become rows of the commit, large ones blobs."""

    async def put_artifact(
        self,
        data: bytes,
        *,
        run: str,
        blob: bool = False,
        sha256: str | None = None,
        shared: bool = False,
    ) -> ArtifactRef:
        """Store the data under the content's hash and return its reference. `sha256` is the hash, if the
        caller has computed it. Data of up to 64 KiB is staged and written with the outcome's commit,
        unless `blob` is set. Other data is durable on return, at `runs/<run>/objects/<sha256>`, or with
        `shared` at `shared/<sha256>`, once for all runs."""
        ...

    async def get_artifact(self, ref: ArtifactRef, *, cached: bool = True) -> bytes:
        """Return the verified bytes. Without `cached` they are read from the store and not from this
        process's memory. Raises CorruptData when size or hash differ, NotFound when absent."""
        ...

    async def discard(self, ref: ArtifactRef) -> None:
        """Delete a blob artifact that nothing needs any more. It may be absent already."""
        ...


class EffectArtifacts(Artifacts, Protocol):
    """The artifacts that one effect writes."""

    @property
    def pending(self) -> Sequence[SmallArtifact]:
        """Those that are written with the outcome's commit."""
        ...


class ArtifactStage(Protocol):
    """Where the artifacts of effects are written."""

    def stage(self) -> EffectArtifacts:
        """Return a writer for one effect."""
        ...
