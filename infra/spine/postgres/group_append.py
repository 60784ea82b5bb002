"""Appends the events of many edges in one commit.

Each entry has a cause of its own, as in `EventStore.append`. One commit costs one write to disk, so a
burst of deliveries costs a few commits and not one for each delivery.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from infra.spine.ports.event_log import (
    Commit,
    CommitMiss,
    EdgeAppend,
    EdgeAppended,
    NewEvent,
    Recorded,
)
from infra.spine.postgres.codec import edge_ids
from schemas.errors import Refused
from schemas.ids import EventId, StreamName


class AppendStore(Protocol):
    """The calls of a log that an append needs."""

    async def commit(self, commit: Commit) -> Sequence[Recorded]: ...

    async def before_append(
        self, streams: Sequence[StreamName], ids: Sequence[EventId]
    ) -> tuple[Mapping[StreamName, int], Mapping[EventId, Recorded]]:
        """Return the versions of these streams, and those of these events that are in the log. A commit
        that finds the streams at these versions has seen everything that was appended to them."""
        ...


async def append_group(
    store: AppendStore, batch: Sequence[EdgeAppend]
) -> list[EdgeAppended | Refused]:
    """Append every entry whose event is not in the log, in as few commits as possible. Returns what
    became of each entry."""
    ids = [edge_ids([entry.event], entry.cause)[0] for entry in batch]
    first = {event_id: number for number, event_id in reversed(list(enumerate(ids)))}
    wanted = {ids[number]: batch[number] for number in sorted(first.values())}
    results = await _append(store, wanted)
    return [
        _as_known(result) if first[event_id] != number else result
        for number, event_id in enumerate(ids)
        for result in [results[event_id]]
    ]


async def _append(
    store: AppendStore, entries: Mapping[EventId, EdgeAppend]
) -> dict[EventId, EdgeAppended | Refused]:
    results: dict[EventId, EdgeAppended | Refused] = {}
    streams = sorted({entry.event.stream for entry in entries.values()})
    while entries:
        try:
            versions, known = await store.before_append(streams, list(entries))
        except Refused as refusal:
            return results | await _append_halves(store, entries, refusal)
        results |= {key: EdgeAppended(recorded, is_new=False) for key, recorded in known.items()}
        entries = {key: entry for key, entry in entries.items() if key not in known}
        if not entries:
            break
        try:
            written = await store.commit(_commit_of(entries, versions))
        except CommitMiss:
            await asyncio.sleep(random.uniform(0, 0.01))  # noqa: S311 - jitter
        except Refused as refusal:
            return results | await _append_halves(store, entries, refusal)
        else:
            new = {recorded.id: EdgeAppended(recorded, is_new=True) for recorded in written}
            return results | new
    return results


async def _append_halves(
    store: AppendStore, entries: Mapping[EventId, EdgeAppend], refusal: Refused
) -> dict[EventId, EdgeAppended | Refused]:
    """Append the entries of a refused commit in two commits. So only the entry that caused the refusal
    is refused in the end."""
    if len(entries) == 1:
        return dict.fromkeys(entries, refusal)
    pairs = list(entries.items())
    middle = len(pairs) // 2
    return {
        **await _append(store, dict(pairs[:middle])),
        **await _append(store, dict(pairs[middle:])),
    }


def _commit_of(entries: Mapping[EventId, EdgeAppend], versions: Mapping[StreamName, int]) -> Commit:
    used = {entry.event.stream for entry in entries.values()}
    expected = {stream: versions[stream] for stream in used}
    reached = dict(expected)
    new = []
    for event_id, entry in entries.items():
        stream = entry.event.stream
        reached[stream] += 1
        new.append(
            NewEvent(
                id=event_id,
                stream=stream,
                version=reached[stream],
                event=entry.event,
                causation=entry.cause,
                correlation=entry.cause,
                traceparent=entry.traceparent,
                actor=entry.actor,
            )
        )
    return Commit(expected=expected, events=tuple(new))


def _as_known(result: EdgeAppended | Refused) -> EdgeAppended | Refused:
    """The result for an entry that repeats an earlier one of its batch."""
    return result if isinstance(result, Refused) else EdgeAppended(result.recorded, is_new=False)
