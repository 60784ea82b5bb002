"""`headrace backup` and `headrace restore`: a consistent copy of the database and its blobs."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from producers.cli.command import command
from producers.cli.database import existing_database, new_database
from producers.cli.display.output import Output
from producers.cli.errors import Failure

if TYPE_CHECKING:
    from infra.operations.maintenance.backup import Contents

DIRECTORY = click.Path(path_type=Path, file_okay=False)


@command(None, "backup", example="headrace backup /mnt/backups/2025-06-01")
@click.argument("target", metavar="DIR", type=DIRECTORY)
def backup(target: Path) -> Output:
    """Copy the database and every blob that it refers to into DIR, as of one moment.

    Runs continue meanwhile. Use the server's machine and settings: the command reads the database
    of HEADRACE_DATABASE_URL or HEADRACE_HOME, and the blobs of HEADRACE_BLOBS. DIR must be empty or new.
    """
    from infra.adapters import open_blobs
    from infra.operations.maintenance.backup import back_up
    from infra.settings.settings import Settings

    settings = Settings.load(os.environ)

    async def run_backup(url: str) -> "Contents":
        async with open_blobs(settings) as store:
            return await back_up(url, store, settings, target)

    with existing_database(settings) as url:
        contents = asyncio.run(run_backup(url))
    listed = "\n".join(contents.faults[:20])
    failure = Failure(
        "DAMAGED",
        f"the backup lacks {len(contents.faults)} blobs that are missing or damaged in the "
        f"installation itself; examine it with `headrace doctor --deep`:\n{listed}",
    )
    return _output("backed up", contents, target, failure if contents.faults else None)


@command(None, "restore", example="headrace restore /mnt/backups/2025-06-01")
@click.argument("source", metavar="DIR", type=DIRECTORY)
def restore(source: Path) -> Output:
    """Restore a backup into an empty installation.

    The target is HEADRACE_HOME, or HEADRACE_DATABASE_URL with HEADRACE_BLOBS; it must be empty. Start
    the server afterwards as usual: runs continue from the moment of the backup. Do not run the old
    installation on the same blobs any more.
    """
    from infra.adapters import open_blobs
    from infra.operations.maintenance.restore import restore as bring_back
    from infra.settings.settings import Settings

    settings = Settings.load(os.environ)

    async def run_restore(url: str) -> "Contents":
        async with open_blobs(settings) as store:
            return await bring_back(url, store, settings, source)

    with new_database(settings) as url:
        contents = asyncio.run(run_restore(url))
    return _output("restored", contents, source)


def _output(
    what: str, contents: "Contents", directory: Path, failure: Failure | None = None
) -> Output:
    document = {
        "directory": str(directory),
        "taken_at": contents.taken_at.isoformat(),
        "events": contents.num_events,
        "blobs": len(contents.blobs),
        "size": contents.size,
        "faults": list(contents.faults),
    }
    said = (
        f"{what}: {contents.num_events} events, {len(contents.blobs)} blobs "
        f"({contents.size / (1 << 20):.1f} MiB), as of {contents.taken_at:%Y-%m-%d %H:%M:%S} UTC, "
        f"{directory}"
    )
    return Output(document, said, failure=failure)
