"""The chains of the audit list: each entry holds a SHA-256 over its content and the hash before it.

There are two chains, because entries of changes are kept longer than the others. The oldest entries of
a chain are deleted when their time is over, all but the last one. So a chain is verified from its oldest
kept entry on: a changed, missing, added or moved entry after that one breaks it. Entries from before
there were chains have no hashes, and can only come before the very first entry of a chain. Somebody who
can write the database can make a whole new chain. Keep the heads, or exports, in another place to notice
it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

BEGINNING = bytes(32)
"""The hash before the first entry of a chain."""

CHANGES, OTHERS = "changes", "others"

HEADS = "heads"
"""The key of the last line of an export: the last hash of each chain."""

CONTENT = (
    *("at", "last_at", "count", "allowed", "api_key", "owner", "workspace", "organisation"),
    *("address", "method", "route", "subject", "status"),
)
"""The fields of an entry that its hash covers, in this order."""


@dataclass(slots=True)
class ChainReport:
    """The result of a verification: how many entries a chain has, the ids of the first and the last, the
    last hash, and the id of the entry where it breaks (None: nowhere; 0: no entry is left)."""

    entries: int = 0
    first_id: int | None = None
    last_id: int | None = None
    head: str | None = None
    broken_at: int | None = None
    reason: str | None = None


@dataclass(slots=True)
class ChainCheck:
    """Verifies entries as they come, in the order of their ids."""

    reports: dict[str, ChainReport] = field(
        default_factory=lambda: {CHANGES: ChainReport(), OTHERS: ChainReport()}
    )
    _with_older: set[str] = field(default_factory=set)
    """The chains before which there are entries without hashes."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Check an entry: its content, `id`, and both hashes as hexadecimal digits or None."""
        chain = chain_of(entry)
        report = self.reports[chain]
        if report.broken_at is not None:
            return
        if report.head is None and entry["sha256"] is None:
            self._with_older.add(chain)
            return
        is_very_first = report.head is None and chain in self._with_older
        reason = _reason_against(entry, BEGINNING.hex() if is_very_first else report.head)
        report.entries += 1
        report.first_id = entry["id"] if report.first_id is None else report.first_id
        report.last_id, report.head = entry["id"], entry["sha256"]
        if reason is not None:
            report.broken_at, report.reason = entry["id"], reason

    def finish(self, heads: Mapping[str, str]) -> Mapping[str, ChainReport]:
        """The reports. A chain that does not end in its head (chain -> last hash) is broken there."""
        for name, head in heads.items():
            report = self.reports[name]
            if report.broken_at is None and (report.head or BEGINNING.hex()) != head:
                report.broken_at = report.last_id or 0
                report.reason = "the entries after this one are missing"
        return self.reports


def verify(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, ChainReport]:
    """Verify the lines of an export: entries, and then the heads. Raises ValueError when it was cut, or
    goes on after the heads."""
    check, heads = ChainCheck(), None
    for line in lines:
        if heads is not None:
            raise ValueError("there are lines after that of the heads, which is the last one")
        if HEADS in line:
            heads = {name: line[HEADS][name] for name in (CHANGES, OTHERS)}
        else:
            check.add(line)
    if heads is None:
        raise ValueError("it was cut: its last line, with the heads, is missing; export it again")
    return check.finish(heads)


def chain_of(entry: Mapping[str, Any]) -> str:
    """The chain that an entry belongs to."""
    return CHANGES if entry["allowed"] and entry["method"] not in ("GET", "HEAD") else OTHERS


def hash_of(previous: bytes, entry: Mapping[str, Any]) -> bytes:
    """The hash of an entry after the one with the hash `previous`."""
    content = [_plain(name, entry[name]) for name in CONTENT]
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(previous + text.encode()).digest()


def _reason_against(entry: Mapping[str, Any], head: str | None) -> str | None:
    """Why an entry does not follow the one with the hash `head` (None: it is the first that is kept)."""
    try:
        previous = bytes.fromhex(entry["previous_sha256"])
        is_own = hash_of(previous, entry).hex() == entry["sha256"]
    except (TypeError, ValueError, AttributeError):
        return "it has no hash"
    if not is_own:
        return "its content was changed"
    if head is not None and entry["previous_sha256"] != head:
        return "an entry before it is missing, or was added or moved"
    return None


def _plain(name: str, value: Any) -> object:
    """A field as the hash covers it. Times are in UTC, also those that an export holds as text."""
    if name not in ("at", "last_at"):
        return value
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
