"""Audit entries on their way to the database: bounded, and alike ones counted together.

A request that changed something keeps an entry of its own. Reads and refused requests that are alike
share an entry for WINDOW_S, and only MOST_ALIKE different ones are kept apart in that time. So a flood
of requests costs a few rows and a fixed amount of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

WINDOW_S = 10.0
MOST_ALIKE = 100
MOST_CHANGES = 5000
"""How many entries of changes may wait for the database. Further ones share entries, like reads."""

OTHERS = "(others)"
"""The subject of an entry that counts what is beyond MOST_ALIKE."""

READING = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One request, or `count` requests that are alike, from `at` to `last_at`. `route` is empty when the
    request was refused before its route was known."""

    at: datetime
    last_at: datetime
    allowed: bool
    api_key: str | None
    owner: str | None
    workspace: str | None
    address: str
    method: str
    route: str
    subject: str
    status: int
    count: int = 1
    organisation: str | None = None

    @property
    def is_change(self) -> bool:
        return self.allowed and self.method not in READING


AlikeKey = tuple[bool, str | None, str, str, str, int]


class AuditBuffer:
    """The entries that are not in the database yet."""

    def __init__(self) -> None:
        self._changes: list[AuditEntry] = []
        self._alike: dict[AlikeKey, AuditEntry] = {}
        self._window_began: datetime | None = None

    def add(self, entry: AuditEntry) -> None:
        """Keep an entry of a change, or count one that is like another."""
        if entry.is_change and len(self._changes) < MOST_CHANGES:
            self._changes.append(entry)
        else:
            self._count(entry)

    def put_back(self, entries: Sequence[AuditEntry]) -> None:
        """Keep entries that could not be written."""
        for entry in entries:
            self.add(entry)

    def take(self, now: datetime, *, everything: bool = False) -> list[AuditEntry]:
        """Remove and return the entries that are due: all changes, and the others once their window is
        over."""
        taken, self._changes = self._changes, []
        began = self._window_began
        if began is not None and (everything or (now - began).total_seconds() >= WINDOW_S):
            taken += self._alike.values()
            self._alike, self._window_began = {}, None
        return taken

    def _count(self, entry: AuditEntry) -> None:
        if self._window_began is None:
            self._window_began = entry.at
        key = (entry.allowed, entry.api_key, entry.address, entry.method, entry.route, entry.status)
        if key not in self._alike and len(self._alike) >= MOST_ALIKE:
            key = (entry.allowed, None, "", "", "", entry.status)
            entry = replace(
                entry, api_key=None, owner=None, workspace=None, address="", method="", route=""
            )
            entry = replace(entry, subject=OTHERS, organisation=None)
        known = self._alike.get(key)
        if known is not None:
            last_at = max(known.last_at, entry.last_at)
            entry = replace(known, count=known.count + entry.count, last_at=last_at)
        self._alike[key] = entry
