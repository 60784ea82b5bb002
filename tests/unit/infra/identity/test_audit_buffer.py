"""Audit entries in memory: changes are kept apart, and a flood is counted in few entries."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from infra.identity.audit_buffer import MOST_ALIKE, MOST_CHANGES, OTHERS, AuditBuffer, AuditEntry

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENTRY = AuditEntry(
    at=NOW,
    last_at=NOW,
    allowed=True,
    api_key="t",
    owner="ada",
    workspace=None,
    address="192.0.2.1",
    method="POST",
    route="/runs",
    subject="/api/v1/runs",
    status=201,
)


def test_each_change_has_an_entry() -> None:
    buffer = AuditBuffer()
    for _ in range(3):
        buffer.add(ENTRY)
    assert buffer.take(NOW) == [ENTRY] * 3
    assert buffer.take(NOW) == []


def test_reads_that_are_alike_are_counted_until_their_window_is_over() -> None:
    buffer = AuditBuffer()
    read = replace(ENTRY, method="GET", status=200)
    later = NOW + timedelta(seconds=3)
    buffer.add(read)
    buffer.add(replace(read, at=later, last_at=later, subject="/api/v1/runs/x"))
    assert buffer.take(later) == []
    assert buffer.take(NOW + timedelta(seconds=10)) == [replace(read, count=2, last_at=later)]


def test_a_flood_of_refused_requests_makes_few_entries() -> None:
    buffer = AuditBuffer()
    for number in range(100_000):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        refused = replace(ENTRY, allowed=False, api_key=None, status=401, address=address)
        buffer.add(replace(refused, subject=f"/{number}"))
    found = buffer.take(NOW, everything=True)
    assert len(found) == MOST_ALIKE + 1
    assert sum(entry.count for entry in found) == 100_000
    assert found[-1].subject == OTHERS


def test_changes_that_wait_for_the_database_are_bounded() -> None:
    buffer = AuditBuffer()
    for _ in range(MOST_CHANGES + 100):
        buffer.add(ENTRY)
    found = buffer.take(NOW, everything=True)
    assert len(found) == MOST_CHANGES + 1
    assert sum(entry.count for entry in found) == MOST_CHANGES + 100


def test_entries_that_could_not_be_written_come_again() -> None:
    buffer = AuditBuffer()
    buffer.add(ENTRY)
    buffer.put_back(buffer.take(NOW))
    assert buffer.take(NOW) == [ENTRY]
