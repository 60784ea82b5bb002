"""`headrace doctor --deep`: check that all data that the log refers to exists and is undamaged."""

import asyncio
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from producers.cli.database import existing_database
from producers.cli.display.output import print_json, print_table, say
from producers.cli.errors import Failure

if TYPE_CHECKING:
    from infra.maintenance.integrity import Inspection

MAX_SHOWN = 50


def check_integrity(*, as_json: bool) -> None:
    """Inspect the installation that this machine's settings name, and print the result. Raises Failure
    when something is damaged."""
    from infra.adapters import open_blobs
    from infra.maintenance.integrity import inspect
    from infra.settings.settings import Settings

    settings = Settings.load(os.environ)

    async def run_inspection(url: str) -> "Inspection":
        async with open_blobs(settings) as store:
            return await inspect(url, store, settings)

    with existing_database(settings) as url:
        found = asyncio.run(run_inspection(url))
    if as_json:
        print_json({"ok": not found.damages, **asdict(found)})
    else:
        _show(found)
    if found.damages:
        kinds = ", ".join(sorted({damage.kind for damage in found.damages}))
        raise Failure(
            "DAMAGED",
            f"{len(found.damages)} damages found ({kinds}); restore the lost data from a backup that is "
            "older than the damage (docs/runbook.md)",
        )


def _show(found: "Inspection") -> None:
    say(
        f"read: {found.events} events, {found.rows} small artifacts, {found.blobs} blobs, "
        f"{found.manifests} manifests"
    )
    rows = [(d.kind, d.what, d.message) for d in found.damages[:MAX_SHOWN]]
    if rows:
        print_table("Damages", ("kind", "what", "message"), rows)
