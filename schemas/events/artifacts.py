"""Events of versioned artifacts: capabilities, tasks and models that an organisation publishes."""

from typing import ClassVar

from pydantic import Field

from schemas.artifact_refs import ArtifactRef, Sha256
from schemas.events.event import WORKSPACE_TOPIC, Event
from schemas.ids import ArtifactKind, StreamName, artifact_stream


class ArtifactPublished(Event):
    """A version of an artifact was published. It is immutable. `artifact` is an id that follows from
    `organisation` (an id), `kind`, `artifact_name` and `semver`. `content` is the archive (tar.gz).
    `detail` is a JSON document with its manifest and the path, size and SHA-256 of each file.
    `published_by` is the owner and the id of the API key."""

    type: ClassVar[str] = "rl.artifact.published"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    artifact: str
    organisation: str
    kind: ArtifactKind
    artifact_name: str
    semver: str
    content: ArtifactRef
    detail: ArtifactRef
    num_files: int = Field(ge=0)
    unpacked_bytes: int = Field(ge=0)
    summary: str = Field(default="", max_length=500)
    published_by: str | None = None

    @property
    def stream(self) -> StreamName:
        return artifact_stream(self.artifact)

    @property
    def run_id(self) -> str:
        return self.artifact

    @property
    def full_name(self) -> str:
        """How users name the version: NAME@VERSION."""
        return f"{self.artifact_name}@{self.semver}"


class ArtifactWithdrawn(Event):
    """A version of an artifact was withdrawn, and its publication removed from the log. The version can
    only be published again with the content that it had, whose SHA-256 is `sha256`."""

    type: ClassVar[str] = "rl.artifact.withdrawn"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    artifact: str
    organisation: str
    kind: ArtifactKind
    artifact_name: str
    semver: str
    sha256: Sha256

    @property
    def stream(self) -> StreamName:
        return artifact_stream(self.artifact)

    @property
    def run_id(self) -> str:
        return self.artifact
