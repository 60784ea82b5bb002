"""The reference to an artifact, which events, effects and messages carry in place of its bytes."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ArtifactRef(BaseModel):
    """A claim check: where bytes are stored, and how to verify that they are the right ones."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    uri: str
    sha256: Sha256
    size: int = Field(ge=0)
