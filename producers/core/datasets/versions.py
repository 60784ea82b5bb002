"""The versions of a dataset. Each is immutable, and has an id and a stream of its own.

The id of the first version is that of the dataset, its *series*. Those of later versions are derived
from it and from their numbers. A name means the newest version, and `name@2` the second one. While a
dataset has any version, the number of a deleted one is not used again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.spine.ports.event_log import EventStore, Recorded
from schemas.events import DatasetRegistered
from schemas.ids import DatasetId, dataset_stream, short_id

AT_ONCE = 8
"""How many versions are looked up at once, at first."""


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """A version of a dataset: the event that registered it."""

    recorded: Recorded
    event: DatasetRegistered

    @property
    def number(self) -> int:
        return self.event.dataset.version


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that a dataset has, the oldest first, and the number of the next one."""

    found: Sequence[DatasetVersion]
    next_number: int

    @property
    def newest(self) -> DatasetVersion | None:
        return self.found[-1] if self.found else None

    def find_number(self, number: int) -> DatasetVersion | None:
        return next((one for one in self.found if one.number == number), None)


def version_id(series: str, number: int) -> DatasetId:
    """The id of a version of a dataset."""
    return DatasetId(series if number == 1 else short_id("dataset-version", f"{series}/{number}"))


def split_version(ref: str) -> tuple[str, int | None]:
    """A name, and the number of the version that follows it after `@`, if one does."""
    name, at, number = ref.rpartition("@")
    if not at or not number.isascii() or not number.isdigit() or not 0 < len(number) <= 9:
        return ref, None
    return (name, int(number)) if number[0] != "0" else (ref, None)


def name_of_version(name: str, number: int) -> str:
    """How a version is named: the first one by the name alone."""
    return name if number == 1 else f"{name}@{number}"


async def load_versions(log: EventStore, series: str) -> Versions:
    """All versions of a dataset, by its id."""
    found: list[DatasetVersion] = []
    first, count, used = 1, AT_ONCE, 0
    while True:
        streams = [
            dataset_stream(version_id(series, number)) for number in range(first, first + count)
        ]
        loaded = await log.load(dict.fromkeys(streams, 0))
        for number, stream in enumerate(streams, start=first):
            if loaded[stream]:
                used = number
                last = loaded[stream][-1]
                if isinstance(last.event, DatasetRegistered):
                    found.append(DatasetVersion(last, last.event))
        if used < first + count - 1:
            return Versions(found, used + 1 if found else 1)
        first, count = first + count, 2 * count
