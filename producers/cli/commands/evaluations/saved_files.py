"""`headrace eval files`: the files of an evaluation, and its figures as a table."""

from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.commands.evaluations.results import EVAL
from producers.cli.display.output import Document, Output, Part, fields, table
from producers.cli.display.units import format_size
from producers.cli.errors import Failure

OUTCOMES = ("attempts", "graded", "passed", "failed", "skipped", "tokens")
SPREAD = ("mean", "std", "min", "median", "max")


def summary_table(summary: Document) -> Part:
    """The attempts by outcome, the tokens, and the spread of the rewards."""
    pairs: list[tuple[str, object]] = [(key, summary.get(key)) for key in OUTCOMES]
    rewards = summary.get("rewards") or {}
    pairs += [(f"reward {key}", f"{rewards[key]:.4g}") for key in SPREAD if key in rewards]
    return fields("Attempts", pairs)


@command(None, "files", example="headrace eval files my-eval --types trajectories -o results")
@EVAL
@click.option(
    "--types", metavar="LIST", help="Of metrics, trajectories, artifacts and logs. Default: all."
)
@click.option("--rows", metavar="LIST", help="Only attempts at these rows, like 0,3-5.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Save the files in this directory.",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def files(
    client: Client,
    ref: str,
    *,
    types: str | None,
    rows: str | None,
    output: Path | None,
    force: bool,
) -> Output:
    """List the files of an evaluation, or save them.

    They are its figures, its log, each attempt as a conversation, and what workflows left behind.
    """
    path = f"/evals/{path_segment(ref)}/files"
    answer = client.get(path, {"types": types, "rows": rows})
    listed: list[Document] = answer["files"]
    if output is None:
        shown = [(one["path"], format_size(one["size"])) for one in listed]
        return Output(answer, table(f"Files of {ref}", ("path", "size"), shown))
    for one in listed:
        place = _place_of(output, str(one["path"]))
        if place.exists() and not force:
            raise Failure(
                "CONFLICT",
                f"the file {place} already exists; choose another directory, or overwrite it with "
                "--force",
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        client.download(f"{path}/{'/'.join(map(path_segment, one['path'].split('/')))}", place)
    return Output({**answer, "directory": str(output)}, f"saved {len(listed)} files in {output}")


def _place_of(directory: Path, path: str) -> Path:
    """Where a file is saved. Raises Failure for a path that leads elsewhere."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise Failure(
            "REFUSED", f"the server named the file {path!r}, which is not below {directory}"
        )
    return directory / path
