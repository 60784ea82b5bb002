"""Events of datasets."""

from typing import ClassVar

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.datasets import DatasetOrigin
from schemas.events.event import WORKSPACE_TOPIC, Event
from schemas.ids import StreamName, dataset_stream
from schemas.specs import DatasetRef


class DatasetRegistered(Event):
    """A version of a dataset was uploaded, validated and stored. `columns` are the names after
    mapping. `mapping` holds the renamed columns: the file's name of each and the name under which it
    is read. `characters` holds the characters of prompts and labels, sorted, the first 512.
    `workspace` is the only one that may use the dataset; None means all of `organisation` (an id;
    None: of `main`). `series` is the id of the dataset's first version; None means that this is it.
    `origin` is the run whose samples the rows are; None means that they were uploaded."""

    type: ClassVar[str] = "rl.dataset.registered"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    dataset: DatasetRef
    columns: tuple[str, ...]
    file_name: str
    file_size: int
    original: ArtifactRef
    mapping: dict[str, str] = {}
    characters: str = ""
    workspace: str | None = None
    organisation: str | None = Field(default=None, exclude_if=lambda value: value is None)
    series: str | None = Field(default=None, exclude_if=lambda value: value is None)
    origin: DatasetOrigin | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def has_trajectories(self) -> bool:
        """Whether the rows are recorded groups for offline RL."""
        return self.origin is not None and self.origin.is_trajectories

    @property
    def stream(self) -> StreamName:
        return dataset_stream(self.dataset.dataset)

    @property
    def run_id(self) -> str:
        return self.dataset.dataset


class DatasetDeleted(Event):
    """A user deleted a version of a dataset. Its registration is removed from the log. With the last
    version the name of the dataset can be used again."""

    type: ClassVar[str] = "rl.dataset.deleted"
    topic: ClassVar[str] = WORKSPACE_TOPIC
    dataset: str

    @property
    def stream(self) -> StreamName:
        return dataset_stream(self.dataset)

    @property
    def run_id(self) -> str:
        return self.dataset
