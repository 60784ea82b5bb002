"""`headrace checkpoint`: the results of training. REF is RUN@STEP, RUN@last, RUN@best or
RUN@best:METRIC."""

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import click

from producers.cli.checkpoint_files import fetch_file, keep_out_of_git, name_local_base
from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import FEW, LIMIT, OFFSET, group
from producers.cli.display.figures import difference_rows, value_text
from producers.cli.display.output import (
    Document,
    Output,
    Part,
    fields,
    printable,
    say,
    table,
    time_ago,
)
from producers.cli.display.units import checkpoint_table, format_size
from producers.cli.display.waiting import told_while_waiting
from producers.cli.errors import Failure

checkpoint = group(
    "checkpoint",
    "Checkpoints: list, show, compare, download, merge, chat. REF is RUN@STEP, RUN@last, RUN@best or "
    "RUN@best:METRIC.",
)

REF = click.argument("ref", metavar="REF")
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


@command(checkpoint, "list", example="headrace checkpoint list my-run")
@click.argument("run", metavar="[RUN]", required=False)
@click.option(
    "--tuning",
    type=click.Choice(["lora", "full"]),
    help="Without RUN: only of runs that train this.",
)
@LIMIT
@OFFSET
def list_(
    client: Client, run: str | None, *, tuning: str | None, limit: int, offset: int
) -> Output:
    """List the checkpoints of a run, or of all runs.

    Those of all runs are listed with the newest first. RUN-step-N is another name of RUN@N.
    """
    if run is None:
        query = {"tuning": tuning, "limit": limit, "offset": offset}
        answer = client.get("/checkpoints", query)
        return Output(answer, _all_checkpoints(answer["checkpoints"]))
    if tuning is not None:
        raise click.UsageError("give RUN or --tuning, not both")
    answer = client.get(f"/runs/{path_segment(run)}/checkpoints")
    return Output(answer, checkpoint_table(f"Checkpoints of {run}", answer["checkpoints"]))


def _all_checkpoints(found: Sequence[Document]) -> Part:
    rows = [
        (c["ref"], c["model"], c["tuning"], c["reward"], time_ago(c["created_at"])) for c in found
    ]
    return table("Checkpoints", ("ref", "base model", "tuning", "reward", "created"), rows)


@command(checkpoint, "info", example="headrace checkpoint info my-run@last")
@REF
def info(client: Client, ref: str) -> Output:
    """Show a checkpoint: its manifest hash and its files."""
    answer = client.get(f"/checkpoints/{path_segment(ref)}")
    found: Document = answer["checkpoint"]
    keys = (
        "run",
        "step",
        "ref",
        "reward",
        "uri",
        "manifest_sha256",
        "adapter_sha256",
        "created_at",
    )
    pairs = [(key, found.get(key)) for key in keys]
    return Output(answer, fields(f"Checkpoint {ref}", pairs), _files(found))


def _files(found: Document) -> Part:
    rows = [
        (f.get("name"), format_size(f.get("size")), f.get("sha256"))
        for f in found.get("files") or ()
    ]
    return table("Files", ("name", "size", "sha256"), rows)


@command(checkpoint, "compare", example="headrace checkpoint compare my-run@2 my-run@best")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@FEW
def compare(client: Client, first: str, second: str, *, limit: int) -> Output:
    """Compare two checkpoints.

    It shows held-out rewards, the held-out rows that changed, and settings that differ. A row is
    gained when a larger share of the answers to it passes in B, and lost when a smaller one does. With
    --json, every row is shown.
    """
    found = client.get(f"/checkpoints/{path_segment(first)}/compare/{path_segment(second)}")
    return Output(found, _comparison(found, limit))


def _comparison(found: Document, limit: int) -> Iterator[Part]:
    a, b = found["checkpoints"]
    columns = ("", str(a.get("ref")), str(b.get("ref")))
    keys = ("reward", "adapter_sha256", "created_at")
    held_out = [value_text(c.get("held_out_reward"), c.get("held_out_interval")) for c in (a, b)]
    facts = [("held_out_reward", *held_out), *((key, a.get(key), b.get(key)) for key in keys)]
    yield table("Checkpoints", columns, facts)
    if found["differences"]:
        columns_of = ("held out", "difference", "standard error", "95 % interval", "rows")
        yield table("Paired differences", columns_of, difference_rows(found["differences"]))
    settings = [(s["key"], *s["values"]) for s in found["settings"]]
    if settings:
        yield table("Settings that differ", columns, settings)
    if found["reason"]:
        yield f"rows are not compared: {found['reason']}"
        return
    counts = ", ".join(f"{count} {change}" for change, count in found["counts"].items())
    changed = [row for row in found["rows"] if row["change"] != "same" or row["difference"]]
    rows = [
        (r.get("row"), r.get("change"), *r["reward"], r.get("difference")) for r in changed[:limit]
    ]
    shown = ("row", "change", str(a.get("ref")), str(b.get("ref")), "difference")
    yield table(f"Held-out rows ({counts})", shown, rows)
    if len(changed) > limit:
        yield f"{len(changed) - limit} more rows changed; add --limit N or --json"


@command(checkpoint, "download", example="headrace checkpoint download my-run@last ./adapter")
@REF
@click.argument(
    "directory",
    metavar="[DIR]",
    required=False,
    type=click.Path(path_type=Path, file_okay=False),
)
@click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
def download(client: Client, ref: str, directory: Path | None, *, force: bool) -> Output:
    """Download the files of a checkpoint into DIR.

    DIR is ./RUN-STEP by default. Each file is verified against its hash. Transformers loads DIR
    directly; an adapter needs PEFT too. When an adapter's base model has no public name, the base is
    saved in DIR/base and adapter_config.json names that directory. If you move DIR afterwards, pass the
    base to PEFT yourself or download again.
    """
    found: Document = client.get(f"/checkpoints/{path_segment(ref)}")["checkpoint"]
    named = str(found.get("ref") or ref)
    directory = directory or Path(UNUSUAL.sub("-", named).strip(".") or "checkpoint")
    is_in_use = directory.exists() and any(directory.iterdir())
    if is_in_use and not force:
        raise Failure("CONFLICT", f"{directory} is not empty; name a new directory, or add --force")
    exact = path_segment(named)
    for file in found["files"]:
        fetch_file(client, exact, file, directory)
    if not is_in_use:
        keep_out_of_git(directory)
    base = name_local_base(directory)
    document = {"directory": str(directory.resolve()), "checkpoint": found}
    return Output(
        {**document, "base": str(base) if base else None},
        f"saved {found.get('ref')} in {directory}; the sha256 of every file is correct",
        f"adapter_config.json names its base model: {base}" if base is not None else None,
        _files(found),
    )


@command(checkpoint, "merge", example="headrace checkpoint merge my-run@last ./model")
@REF
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--base",
    metavar="MODEL",
    help="Base model to merge into: a directory or a hub id. Default: the one that the adapter names.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Data type of the weights in DIR. Merging itself uses float32.",
)
def merge(
    client: Client, ref: str, directory: Path, *, base: str | None, dtype: str, as_json: bool
) -> Output:
    """Merge a LoRA checkpoint into its base model.

    DIR becomes a plain Transformers directory that does not need PEFT. Merging runs on this machine and
    needs torch: pip install 'headrace[train]'.
    """
    from producers.cli.commands.merge import merge_checkpoint

    made = merge_checkpoint(client, ref, directory, base=base, dtype=dtype, quiet=as_json)
    said = f"merged {made['ref']} into its base, in {directory} ({dtype})"
    return Output(made, said, _files(made))


@command(
    checkpoint, "chat", example="headrace checkpoint chat my-run@last --message 'What is 47 + 38?'"
)
@REF
@click.option("--message", help="Send one message and exit.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Maximum length of an answer.",
)
def chat(
    client: Client,
    ref: str,
    *,
    message: str | None,
    temperature: float,
    max_tokens: int,
    as_json: bool,
) -> Output | None:
    """Chat with a checkpoint."""
    if as_json and message is None:
        raise click.UsageError("--json needs --message; add --message TEXT")
    options = {"temperature": temperature, "max_tokens": max_tokens}
    if message is None:
        _talk(client, ref, options)
        return None
    with _told_of_loading(ref, quiet=as_json):
        answer = _ask(client, ref, [{"role": "user", "content": message}], options)
    return Output(answer, str(answer["message"]["content"]))


def _told_of_loading(ref: str, *, quiet: bool = False) -> AbstractContextManager[None]:
    said = f"waiting for the answer of {ref}; a worker loads the model before its first answer"
    return told_while_waiting(lambda: said, quiet=quiet)


def _ask(
    client: Client, ref: str, messages: list[dict[str, str]], options: dict[str, float]
) -> Document:
    return client.post(f"/checkpoints/{path_segment(ref)}/chat", {"messages": messages, **options})


def _talk(client: Client, ref: str, options: dict[str, float]) -> None:
    say(f"chatting with {ref}; end with an empty line or Ctrl-D")
    messages: list[dict[str, str]] = []
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        with _told_of_loading(ref):
            reply = str(_ask(client, ref, messages, options)["message"]["content"])
        messages.append({"role": "assistant", "content": reply})
        say(printable(f"< {reply}"))


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
