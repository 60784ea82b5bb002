"""`headrace doctor --deep`: check that all data that the log refers to exists and is undamaged."""

import asyncio
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from producers.cli.database import existing_database
from producers.cli.display.output import Output, table
from producers.cli.errors import Failure

if TYPE_CHECKING:
    from infra.operations.maintenance.integrity import Inspection

MAX_SHOWN = 50


def check_integrity() -> Output:
    """Inspect the installation that this machine's settings name, and return the result, which fails
    when something is damaged."""
    from infra.adapters import open_blobs
    from infra.operations.maintenance.integrity import inspect
    from infra.settings.settings import Settings

    settings = Settings.load(os.environ)

    async def run_inspection(url: str) -> "Inspection":
        async with open_blobs(settings) as store:
            return await inspect(url, store, settings)

    with existing_database(settings) as url:
        found = asyncio.run(run_inspection(url))
    kinds = ", ".join(sorted({damage.kind for damage in found.damages}))
    failure = Failure(
        "DAMAGED",
        f"{len(found.damages)} damages found ({kinds}); restore the lost data from a backup that is "
        "older than the damage (docs/runbook.md)",
    )
    rows = [(d.kind, d.what, d.message) for d in found.damages[:MAX_SHOWN]]
    return Output(
        {"ok": not found.damages, **asdict(found)},
        f"read: {found.events} events, {found.rows} small artifacts, {found.blobs} blobs, "
        f"{found.manifests} manifests",
        table("Damages", ("kind", "what", "message"), rows) if rows else None,
        failure=failure if found.damages else None,
    )
