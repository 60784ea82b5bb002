"""A migration that a database may have applied never changes, not even in a comment: the checksum of
each is stored in the database, and a changed one stops `headrace up`."""

import hashlib
from pathlib import Path

from infra.spine.postgres.migrate import migrations

RECORDED = Path(__file__).parent / "migrations.sha256"


def test_no_migration_changes_after_it_was_written() -> None:
    lines = (line.split() for line in RECORDED.read_text().splitlines())
    recorded = {name: checksum for checksum, name in lines}
    found = {migration.name: migration.checksum for migration in migrations()}
    changed = [name for name in recorded if found.get(name) != recorded[name]]
    assert not changed, "restore these files, and put the change into a new migration"
    assert not set(found) - set(recorded), f"add its line to {RECORDED.name}"


def test_the_checksum_is_that_of_the_whole_file() -> None:
    """A comment counts too, because a database compares it."""
    first = migrations()[0]
    assert first.checksum == hashlib.sha256(first.sql.encode()).hexdigest()
    assert first.checksum != hashlib.sha256(f"{first.sql}-- more\n".encode()).hexdigest()
