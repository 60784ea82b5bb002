"""The port of model hubs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from schemas.secrets.secret_value import SecretValue


@dataclass(frozen=True, slots=True)
class PreparedUpload:
    """A directory that becomes one commit of a repository. `id` is written into the commit, so that the
    same upload is not committed twice."""

    id: str
    directory: Path
    repository: str
    private: bool
    title: str


@dataclass(frozen=True, slots=True)
class HubCommit:
    """The commit that has the files of an upload."""

    url: str
    revision: str


class ModelHub(Protocol):
    """Uploads models."""

    async def upload(self, wanted: PreparedUpload, token: SecretValue) -> HubCommit:
        """Make the commit, or find the one that was made before. Raises Refused with the hub's words
        when the hub does not accept it, HubAway when the hub does not answer or asks to wait, and
        TransientError when the client fails."""
        ...
