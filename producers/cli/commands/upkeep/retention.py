"""`headrace train rename|delete|archive|restore` and `headrace gc`: commands for runs that have
ended."""

from collections.abc import Iterator

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import RUN, parse_age_s
from producers.cli.display.confirm import confirm
from producers.cli.display.output import Document, Output, Part, table, time_ago
from producers.cli.errors import Failure

EVALUATIONS = "evaluations"
UNITS = {
    **dict.fromkeys(("deliveries", "statuses", "deployments", "ref_checks", "syncs"), "events"),
    "usage": "rows",
}
"""In what a kind of records is counted, where that is not whole records."""


@command(None, "rename", example="headrace train rename sums-1 sums-with-a-bug")
@RUN
@click.argument("name", metavar="NEW")
def rename(client: Client, run: str, name: str) -> Output:
    """Rename a run.

    Its id, its checkpoints and references to them do not change. The old name becomes free.
    """
    answer = client.post(f"/runs/{path_segment(run)}/rename", {"name": name})
    return Output(answer, f"renamed {run} to {name}")


@command(None, "delete", example="headrace train delete my-run --yes")
@RUN
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(client: Client, run: str, *, yes: bool, as_json: bool) -> Output:
    """Delete a run that has ended, permanently.

    Its samples, checkpoints and archive are deleted too. The server refuses this while other runs exist
    that started from its checkpoints, or while evaluations use them. The name is free immediately; the
    data is removed after an hour (`headrace gc` removes data that is due).
    """
    confirm(f"delete run {run} with all its samples and checkpoints", yes=yes, as_json=as_json)
    answer = client.delete(f"/runs/{path_segment(run)}")
    return Output(answer, f"deleted {run}")


@command(None, "archive", example="headrace train archive my-run")
@RUN
def archive(client: Client, run: str) -> Output:
    """Move the history of an ended run into an archive file.

    The file is kept in the blob store. Checkpoints stay usable. Samples, curves and events are back
    after `headrace train restore`.
    """
    answer = client.post_slow(f"/runs/{path_segment(run)}/archive")
    return Output(answer, f"archived {run}; restore it with: headrace train restore {run}")


@command(None, "restore", example="headrace train restore my-run")
@RUN
def restore(client: Client, run: str) -> Output:
    """Restore the history of an archived run."""
    answer = client.post_slow(f"/runs/{path_segment(run)}/restore")
    return Output(answer, f"restored {run}")


@command(None, "gc", example="headrace gc --older-than 30d --dry-run")
@click.option(
    "--older-than",
    metavar="AGE",
    required=True,
    help="Only what ended longer ago than this: 90m, 12h, 30d, 8w.",
)
@click.option("--evaluations", is_flag=True, help="Delete old evaluations too, permanently.")
@click.option("--dry-run", is_flag=True, help="Only show what would be archived and deleted.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation of --evaluations.")
def gc(
    client: Client, *, older_than: str, evaluations: bool, dry_run: bool, yes: bool, as_json: bool
) -> Output:
    """Archive old runs, and delete old records and unused data.

    No run is lost: `headrace train restore` restores an archived run. Records are deleted permanently,
    without a question. They are deliveries of webhooks, statuses of commits before the newest, uploads
    to a hub, verifications, former deployments and others (docs/retention.md). Set
    HEADRACE_RETENTION_DAYS, HEADRACE_RECORD_DAYS and HEADRACE_EVALUATION_DAYS to let the server do this
    regularly.
    """
    seconds = parse_age_s(older_than)
    if evaluations and not dry_run:
        confirm(
            f"delete the evaluations that are older than {older_than}", yes=yes, as_json=as_json
        )
    archived: list[Document] = []
    failed: list[tuple[str, Failure]] = []
    old: Document = client.get("/gc", {"older_than_s": seconds})
    due: list[Document] = old["runs"]
    for run in () if dry_run else due:
        try:
            client.post_slow(f"/runs/{path_segment(str(run['id']))}/archive")
            archived.append(run)
        except Failure as error:
            failed.append((str(run["name"]), error))
    records: dict[str, int] = old.get("records", {})
    kept = 0 if evaluations else records.pop(EVALUATIONS, 0)
    done: Document = {"collected": 0, "records": records}
    if not dry_run:
        done = client.post_slow("/gc", {"older_than_s": seconds, "evaluations": evaluations})
    runs = due if dry_run else archived
    shown = [{"id": run["id"], "name": run["name"]} for run in runs]
    note = f"kept evaluations that are older than {older_than}: {kept}; --evaluations deletes them"
    listed = "; ".join(f"{name}: {failure.message}" for name, failure in failed)
    failure = Failure("FAILED", f"{len(failed)} runs were not archived: {listed}")
    return Output(
        {"dry_run": dry_run, "archived": shown, **done},
        _result(runs, done, dry_run=dry_run),
        note if kept else None,
        failure=failure if failed else None,
    )


def _result(runs: list[Document], done: Document, *, dry_run: bool) -> Iterator[Part]:
    rows = [(run["name"], run["status"], time_ago(run.get("completed_at"))) for run in runs]
    yield table("Would be archived" if dry_run else "Archived", ("name", "status", "ended"), rows)
    records = [
        (kind.replace("_", " "), count, UNITS.get(kind, "records"))
        for kind, count in (done.get("records") or {}).items()
        if count
    ]
    title = "Would be deleted" if dry_run else "Deleted"
    yield table(title, ("kind", "number", "counted in"), records)
    if not dry_run:
        yield f"archived {len(runs)} runs; deleted {done['collected']} unused blobs and rows"
