"""`headrace dataset`: the data that runs learn from and are measured on."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import LIMIT, OFFSET, group
from producers.cli.datasets.generated import describe_rows, generate, upload_generated
from producers.cli.datasets.parquet import as_text
from producers.cli.datasets.staged import LARGE_BYTES, upload_in_stages
from producers.cli.display.confirm import confirm
from producers.cli.display.output import (
    Document,
    Output,
    fields,
    one_line,
    table,
    time_ago,
)
from producers.cli.display.units import format_size
from producers.cli.errors import Failure

dataset = group(
    "dataset",
    "Datasets in JSON Lines, CSV or Parquet, or generated. Each upload is validated.",
)

COLUMNS = ("version", "rows", "size", "sha256", "created")

FILE = click.Path(path_type=Path, dir_okay=False)

PREFERENCES = ("chosen", "rejected", "margin")
"""The columns that rows of preferences have in place of a ground truth: for kto one of the first two."""


def _parse_mapping(_context: object, _option: object, texts: Sequence[str]) -> dict[str, str]:
    """The repeated option `COLUMN=NAME` as a mapping."""
    pairs = [text.partition("=") for text in texts]
    for source, _, target in pairs:
        if not source or not target:
            raise click.BadParameter(
                f"{source}={target} is not COLUMN=NAME; write for example question=user_prompt"
            )
    if len({source for source, _, _ in pairs}) < len(pairs):
        raise click.BadParameter("a column is mapped twice; map each column once")
    return {source: target for source, _, target in pairs}


MAP = click.option(
    "--map",
    "mapping",
    metavar="COLUMN=NAME",
    multiple=True,
    callback=_parse_mapping,
    help="Use the column COLUMN of the file as NAME: user_prompt, system_prompt, ground_truth, label, "
    "messages, tools, metadata, prompt, chosen, rejected or completion. Can be repeated.",
)


def _require_file(file: Path) -> Path:
    if not file.is_file():
        raise Failure("NOT_FOUND", f"the file {file} does not exist; name an existing file")
    return file


def default_name(file: Path) -> str:
    """A dataset name made from a file name. It has only lower-case letters, digits, `-` and `_`."""
    return re.sub(r"[^a-z0-9_-]+", "-", file.stem.lower()).strip("-_")[:63] or "dataset"


@command(dataset, "upload", example="headrace dataset upload data/rl.jsonl --name sums")
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--name", help="Name of the dataset. Default: derived from the file name.")
@click.option(
    "--overwrite", is_flag=True, help="Make the file the next version of an existing dataset."
)
@MAP
def upload(
    client: Client,
    file: Path,
    *,
    name: str | None,
    overwrite: bool,
    mapping: Mapping[str, str],
    as_json: bool,
) -> Output:
    """Upload a dataset: JSON Lines, CSV, or Parquet.

    A name means the newest version of a dataset, and NAME@2 the second one. Runs keep the version with
    which they were submitted. A large file is sent in parts; if that is interrupted, the same command
    sends the rest.

    The server validates the file first and reports errors by row and column. It also lists the columns
    that nothing reads. Parquet needs pyarrow on this machine.

    Use --map to upload a public dataset unchanged: --map question=user_prompt --map answer=ground_truth
    """
    with as_text(_require_file(file), mapped=mapping) as text:
        created = upload_file(
            client,
            text,
            name or default_name(file),
            quiet=as_json,
            mapping=mapping,
            overwrites=overwrite,
        )
    said = f"uploaded {version_name(created)}: {created.get('num_rows')} rows"
    return Output({"dataset": created}, said, _unread_note(created))


def _unread_note(found: Document) -> str | None:
    """The names of the columns that no run reads; None without such columns."""
    unread = ", ".join(found.get("unread_columns") or ())
    note = f"note: nothing reads the columns {unread}; to use one, add --map COLUMN=NAME"
    return note if unread else None


def upload_file(
    client: Client,
    file: Path,
    name: str,
    *,
    quiet: bool,
    mapping: Mapping[str, str] | None = None,
    overwrites: bool = False,
) -> Document:
    """Register a dataset and stream its content; returns the dataset. Raises Failure."""
    if overwrites or file.stat().st_size > LARGE_BYTES:
        with _open_with_progress(file, quiet=quiet) as stream:
            return upload_in_stages(
                client, file, stream, name, mapping=mapping, overwrites=overwrites
            )
    body = {"name": name, "file_name": file.name} | ({"mapping": mapping} if mapping else {})
    created = client.post("/datasets", body)
    with _open_with_progress(file, quiet=quiet) as stream:
        put: Document = client.put(str(created["upload"]["path"]), stream)
    found: Document = put["dataset"]
    return found


def version_name(found: Document) -> str:
    """The name of a version of a dataset. The first one has the name of the dataset."""
    version = found.get("version") or 1
    return f"{found.get('name')}@{version}" if version > 1 else str(found.get("name"))


@contextmanager
def _open_with_progress(file: Path, *, quiet: bool) -> Iterator[BinaryIO]:
    """Open the file for reading, with a progress bar on a terminal."""
    if quiet or not sys.stderr.isatty():
        with file.open("rb") as stream:
            yield stream
        return
    from rich.progress import wrap_file

    with (
        file.open("rb") as plain,
        wrap_file(plain, file.stat().st_size, description=file.name, transient=True) as stream,
    ):
        yield stream


@command(dataset, "validate", example="headrace dataset validate data/rl.jsonl")
@click.argument("file", metavar="FILE", type=FILE)
@MAP
def validate(client: Client, file: Path, *, mapping: Mapping[str, str]) -> Output:
    """Check whether a file is a valid dataset, without storing it.

    The exit code is 1 when it is not valid.
    """
    named = {"mapping": json.dumps(mapping)} if mapping else {}
    with as_text(_require_file(file), mapped=mapping) as text:
        answer = client.post_file("/datasets/validate", text, file_name=text.name, **named)
    if not answer.get("valid"):
        from schemas.errors import Issue

        issues = tuple(
            Issue(str(i.get("key")), str(i.get("message")), i.get("did_you_mean"))
            for i in answer.get("issues") or ()
        )
        raise Failure("VALIDATION", f"{file} is not a valid dataset", issues=issues)
    columns = ", ".join(answer.get("columns") or ())
    said = f"{file} is valid: {answer.get('num_rows')} rows, columns {columns}"
    return Output(answer, said, _unread_note(answer))


@command(
    dataset,
    "generate",
    example="headrace dataset generate 'reasoning-gym:gcd?size=500'",
)
@click.argument("tasks", metavar="reasoning-gym:TASK[?KEY=VALUE&...]")
@click.option("--out", type=FILE, help="Write the rows into this file, and upload nothing.")
def generate_(tasks: str, *, out: Path | None, as_json: bool) -> Output:
    """Generate tasks of reasoning-gym, and upload them.

    The same name in a TOML means this dataset: dataset = "reasoning-gym:...". A submit generates the
    datasets that its TOML names and the server does not have, so this command is needed for runs that
    the server starts, such as those of a push.

    size, seed and split=held_out are Headrace's own keys; the others are parameters of the task. No
    question is in both splits. The package is installed and runs in the sandbox of this machine.
    """
    if out is not None:
        rows = generate(tasks)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(rows)
        said = f"wrote {out}: {describe_rows(rows)}"
        return Output({"file": str(out), "num_rows": rows.count(b"\n")}, said)
    with Client() as client:
        found = upload_generated(client, tasks, quiet=as_json)
    how = "generated" if found.is_new else "was generated before:"
    said = f"{how} {found.dataset.get('name')}: {found.dataset.get('num_rows')} rows"
    document = {"dataset": found.dataset, "is_new": found.is_new}
    return Output(document, said, f'dataset = "{tasks}"')


STEPS = re.compile(r"(?P<first>[0-9]{1,9})?(?P<dots>\.\.)?(?P<last>[0-9]{1,9})?")


def _parse_steps(_context: object, _option: object, text: str | None) -> tuple[str, str] | None:
    """The option `A..B`, `A..`, `..B` or `A` as the first and the last step, either may be empty."""
    if text is None:
        return None
    found = STEPS.fullmatch(text)
    if found is None or not (found["first"] or found["last"]):
        raise click.BadParameter(f"{text!r} is not A..B; write for example 10..20")
    first, last = found["first"] or "", found["last"] or ""
    return (first, last) if found["dots"] else (first, first)


@command(
    dataset, "from-run", example="headrace dataset from-run first --as sft --name good --dedupe"
)
@click.argument("run", metavar="RUN|EVALUATION")
@click.option("--name", required=True, help="Name of the dataset.")
@click.option(
    "--as",
    "kind",
    required=True,
    type=click.Choice(["sft", "preference", "trajectory"]),
    help="Demonstrations, pairs of a better and a worse answer, or groups for offline RL.",
)
@click.option("--steps", callback=_parse_steps, help="Only these steps, as A..B. Default: all.")
@click.option("--min-reward", type=float, help="Only answers with at least this reward.")
@click.option("--max-reward", type=float, help="Only answers with at most this reward.")
@click.option("--reward-margin", type=float, help="Of pairs: by how much rewards differ at least.")
@click.option("--best-of-group", is_flag=True, help="With sft: only the best answer of each group.")
@click.option("--dedupe", is_flag=True, help="Only the first of rows that are equal.")
@click.option("--limit", type=click.IntRange(1), help="At most this many rows, the first ones.")
@click.option("--overwrite", is_flag=True, help="Make it the next version of an existing dataset.")
@click.option("--dry-run", is_flag=True, help="Only count the rows, and store nothing.")
def from_run(
    client: Client,
    run: str,
    *,
    name: str,
    kind: str,
    steps: tuple[str, str] | None,
    min_reward: float | None,
    max_reward: float | None,
    reward_margin: float | None,
    best_of_group: bool,
    dedupe: bool,
    limit: int | None,
    overwrite: bool,
    dry_run: bool,
) -> Output:
    """Make a dataset of recorded samples.

    The rows hold what the policy read and wrote, and no ground truth. With --as trajectory, a training
    run with advanced.execution_mode = "offline" learns from them without sampling. Of a run that is not
    over, the steps that are settled are read.
    """
    given = {
        "first_step": int(steps[0]) if steps and steps[0] else None,
        "last_step": int(steps[1]) if steps and steps[1] else None,
        "min_reward": min_reward,
        "max_reward": max_reward,
        "reward_margin": reward_margin,
        "limit": limit,
        "best_of_group": best_of_group or None,
        "dedupe": dedupe or None,
        "overwrite": overwrite or None,
        "dry_run": dry_run or None,
    }
    body = {key: value for key, value in given.items() if value is not None}
    answer = client.post_slow("/datasets/from-run", {"run": run, "name": name, "as": kind, **body})
    made: Document = answer["made"]
    rows, samples = made["rows"], made["samples"]
    where = f"steps {made['first_step']}..{made['last_step']}" if made["last_step"] else run
    if answer["dataset"] is None:
        said = f"{name} would have {rows} rows of {samples} samples ({where})"
    else:
        said = f"made {version_name(answer['dataset'])}: {rows} rows of {samples} samples ({where})"
    more = None if made["has_ended"] else f"{run} has not ended: later samples are not read"
    lost = f"left out: {', '.join(made['left_out'])}" if made["left_out"] else None
    return Output(answer, said, lost, more)


@command(dataset, "list", example="headrace dataset list")
@LIMIT
@OFFSET
def list_(client: Client, *, limit: int, offset: int) -> Output:
    """List the datasets of this server."""
    answer = client.get("/datasets", {"limit": limit, "offset": offset})
    found: list[Document] = answer["datasets"]
    rows = [
        (version_name(d), d.get("status"), d.get("num_rows"), time_ago(d.get("created_at")))
        for d in found
    ]
    refused = [f"{d['name']}: {one_line(d['error'], limit=400)}" for d in found if d.get("error")]
    return Output(answer, table("Datasets", ("name", "status", "rows", "created"), rows), *refused)


@command(dataset, "info", example="headrace dataset info sums")
@click.argument("name", metavar="DATASET")
def info(client: Client, name: str) -> Output:
    """Show a dataset: its rows, columns, size and hash."""
    answer = client.get(f"/datasets/{path_segment(name)}")
    found: Document = answer["dataset"]
    shown = found | {"file_size": format_size(found.get("file_size"))}
    if origin := found.get("origin"):
        shown["origin"] = _origin_text(origin)
    pairs = [(key, value) for key, value in shown.items() if value != {}]
    return Output(answer, fields(f"Dataset {name}", pairs))


def _origin_text(origin: Document) -> str:
    """The run that recorded the rows of a dataset, and how they were chosen."""
    first, last = origin.get("first_step"), origin.get("last_step")
    where = f"steps {first}..{last} of " if last else ""
    named = ("min_reward", "max_reward", "reward_margin", "limit", "best_of_group", "dedupe")
    chosen = [f"{key} {origin[key]}" for key in named if key in origin]
    return ", ".join((f"{where}{origin['name']} as {origin['kind']}", *chosen))


@command(dataset, "versions", example="headrace dataset versions sums")
@click.argument("name", metavar="DATASET")
def versions(client: Client, name: str) -> Output:
    """List the versions of a dataset, the newest first."""
    answer = client.get(f"/datasets/{path_segment(name)}/versions")
    found: list[Document] = answer["versions"]
    rows = [
        (
            version_name(d),
            d.get("num_rows"),
            format_size(d.get("file_size")),
            str(d.get("sha256"))[:12],
            time_ago(d.get("created_at")),
        )
        for d in found
    ]
    return Output(answer, table(f"Dataset {name}", COLUMNS, rows))


@command(dataset, "logs", example="headrace dataset logs sums")
@click.argument("name", metavar="DATASET")
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(1, 200),
    help="Number of lines to show.",
)
@click.option("--cursor", help="Show the lines before this place, which the last page named.")
def logs(client: Client, name: str, *, limit: int, cursor: str | None) -> Output:
    """Show the log of an upload in parts.

    It says when the parts had arrived, and what the check found. Of several uploads under a name the
    newest is shown.
    """
    path = f"/datasets/{path_segment(name)}/logs"
    answer = client.get(path, {"limit": limit, "cursor": cursor})
    rows = [(one["at"], one["level"], one["step"], one["message"]) for one in answer["logs"]]
    following = answer.get("next_cursor")
    more = f"older lines: --cursor {following}" if following else None
    return Output(answer, table(f"Dataset {name}", ("at", "level", "step", "message"), rows), more)


@command(dataset, "preview", example="headrace dataset preview sums --rows 3")
@click.argument("name", metavar="DATASET")
@click.option(
    "--rows",
    default=5,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of rows to show.",
)
def preview(client: Client, name: str, *, rows: int) -> Output:
    """Show the first rows of a dataset as a run reads them."""
    answer = client.get(f"/datasets/{path_segment(name)}/preview", {"rows": rows})
    found: list[Document] = answer["rows"]
    columns = {"label": "ground truth"}
    if any(row.keys() & PREFERENCES for row in found):
        columns = {key: key for key in PREFERENCES if any(key in row for row in found)}
    elif any("trajectory" in row for row in found):
        columns = {"rewards": "rewards"}
        found = [{**row, "rewards": _rewards(row["trajectory"])} for row in found]
    shown = [
        (i, _prompt(row), *(_cell(row.get(key)) for key in columns)) for i, row in enumerate(found)
    ]
    titles = ("row", "prompt", *columns.values())
    return Output(answer, table(f"Dataset {name}", titles, shown))


def _rewards(trajectory: Document) -> str:
    return " ".join("-" if one is None else f"{one:g}" for one in trajectory["rewards"])


def _cell(value: object) -> str | None:
    return None if value is None else one_line(str(value))


def _prompt(row: Document) -> str:
    messages = row.get("prompt")
    if not isinstance(messages, list):
        return one_line(str(row))
    return one_line(" | ".join(str(m.get("content")) for m in messages))


@command(dataset, "download", example="headrace dataset download sums sums.jsonl")
@click.argument("name", metavar="DATASET")
@click.argument("file", metavar="[FILE]", required=False, type=FILE)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def download(client: Client, name: str, file: Path | None, *, force: bool) -> Output:
    """Save a dataset to a file.

    Without FILE, the name of the uploaded file is used.
    """
    found: Document = client.get(f"/datasets/{path_segment(name)}")["dataset"]
    target = file or Path(Path(str(found.get("file_name") or f"{name}.jsonl")).name)
    if target.exists() and not force:
        raise Failure(
            "CONFLICT",
            f"the file {target} already exists; name another file, or overwrite it with --force",
        )
    sha256 = client.download(f"/datasets/{path_segment(name)}/content", target)
    size = target.stat().st_size
    document = {"file": str(target), "sha256": sha256, "size": size}
    return Output(document, f"saved {target} ({format_size(size)})")


@command(dataset, "delete", example="headrace dataset delete sums --yes")
@click.argument("name", metavar="DATASET")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(client: Client, name: str, *, yes: bool, as_json: bool) -> Output:
    """Delete a dataset or a rejected upload permanently.

    NAME@2 deletes the second version alone. Without a number, all versions are deleted.

    The server refuses this while a run exists that was trained or validated on the dataset, because such
    a run could no longer be verified: delete the run first. It also refuses while an evaluation uses it.
    """
    confirm(f"delete dataset {name}", yes=yes, as_json=as_json)
    answer = client.delete(f"/datasets/{path_segment(name)}")
    return Output(answer, f"deleted {name}")
