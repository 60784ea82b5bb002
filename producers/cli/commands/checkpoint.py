"""`headrace checkpoint`: the results of training. REF is RUN@STEP, RUN@last, RUN@best or
RUN@best:METRIC."""

from pathlib import Path

import click

from producers.cli.checkpoint_files import fetch_file, keep_out_of_git, name_local_base
from producers.cli.client import Client, path_segment
from producers.cli.command_tree import command, group
from producers.cli.display.figures import difference_rows
from producers.cli.display.output import (
    Document,
    print_fields,
    print_json,
    print_table,
    printable,
    say,
    time_ago,
)
from producers.cli.display.units import format_size, hub_cell
from producers.cli.errors import Failure

checkpoint = group(
    "checkpoint",
    "Checkpoints: list, show, compare, download, merge, chat. REF is RUN@STEP, RUN@last, RUN@best or "
    "RUN@best:METRIC.",
)


@command(checkpoint, "list", example="headrace checkpoint list my-run")
@click.argument("run", metavar="RUN")
def list_(run: str, *, as_json: bool) -> None:
    """List the checkpoints of a run."""
    with Client() as client:
        answer = client.get(f"/runs/{path_segment(run)}/checkpoints")
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            c.get("ref"),
            c.get("reward"),
            str(c.get("adapter_sha256"))[:16],
            hub_cell(c),
            time_ago(c.get("created_at")),
        )
        for c in answer["checkpoints"]
    ]
    columns = ("ref", "reward", "weights sha256", "hub", "created")
    print_table(f"Checkpoints of {run}", columns, rows)


@command(checkpoint, "info", example="headrace checkpoint info my-run@last")
@click.argument("ref", metavar="REF")
def info(ref: str, *, as_json: bool) -> None:
    """Show a checkpoint: its manifest hash and its files."""
    with Client() as client:
        answer = client.get(f"/checkpoints/{path_segment(ref)}")
    if as_json:
        print_json(answer)
        return
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
    print_fields(f"Checkpoint {ref}", [(key, found.get(key)) for key in keys])
    _files(found)


def _files(found: Document) -> None:
    rows = [
        (f.get("name"), format_size(f.get("size")), f.get("sha256"))
        for f in found.get("files") or ()
    ]
    print_table("Files", ("name", "size", "sha256"), rows)


@command(checkpoint, "compare", example="headrace checkpoint compare my-run@2 my-run@best")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--limit", default=20, show_default=True, type=click.IntRange(1), help="Show at most this many."
)
def compare(first: str, second: str, *, limit: int, as_json: bool) -> None:
    """Compare two checkpoints.

    It shows held-out rewards, the held-out rows that changed, and settings that differ. A row is
    gained when a larger share of the answers to it passes in B, and lost when a smaller one does. With
    --json, every row is shown.
    """
    with Client() as client:
        found = client.get(f"/checkpoints/{path_segment(first)}/compare/{path_segment(second)}")
    if as_json:
        print_json(found)
        return
    a, b = found["checkpoints"]
    columns = ("", str(a.get("ref")), str(b.get("ref")))
    keys = ("held_out_reward", "reward", "adapter_sha256", "created_at")
    print_table("Checkpoints", columns, [(key, a.get(key), b.get(key)) for key in keys])
    if found["differences"]:
        columns_of = ("held out", "difference", "standard error", "95 % interval", "rows")
        print_table("Paired differences", columns_of, difference_rows(found["differences"]))
    print_table(
        "Settings that differ", columns, [(s["key"], *s["values"]) for s in found["settings"]]
    )
    if found["reason"]:
        say(f"rows are not compared: {found['reason']}")
        return
    counts = ", ".join(f"{count} {change}" for change, count in found["counts"].items())
    changed = [row for row in found["rows"] if row["change"] != "same" or row["difference"]]
    rows = [
        (r.get("row"), r.get("change"), *r["reward"], r.get("difference")) for r in changed[:limit]
    ]
    shown = ("row", "change", str(a.get("ref")), str(b.get("ref")), "difference")
    print_table(f"Held-out rows ({counts})", shown, rows)
    if len(changed) > limit:
        say(f"{len(changed) - limit} more rows changed; add --limit N or --json")


@command(checkpoint, "download", example="headrace checkpoint download my-run@last ./adapter")
@click.argument("ref", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
def download(ref: str, directory: Path, *, force: bool, as_json: bool) -> None:
    """Download the files of a checkpoint into DIR.

    Each file is verified against its hash. Transformers loads DIR directly; an adapter needs PEFT too.
    When an adapter's base model has no public name, the base is saved in DIR/base and
    adapter_config.json names that directory. If you move DIR afterwards, pass the base to PEFT yourself
    or download again.
    """
    is_in_use = directory.exists() and any(directory.iterdir())
    if is_in_use and not force:
        raise Failure("CONFLICT", f"{directory} is not empty; name a new directory, or add --force")
    with Client() as client:
        found: Document = client.get(f"/checkpoints/{path_segment(ref)}")["checkpoint"]
        exact = path_segment(str(found.get("ref") or ref))
        for file in found["files"]:
            fetch_file(client, exact, file, directory)
    if not is_in_use:
        keep_out_of_git(directory)
    base = name_local_base(directory)
    if as_json:
        document = {"directory": str(directory.resolve()), "checkpoint": found}
        print_json({**document, "base": str(base) if base else None})
        return
    say(f"saved {found.get('ref')} in {directory}; the sha256 of every file is correct")
    if base is not None:
        say(f"adapter_config.json names its base model: {base}")
    _files(found)


@command(checkpoint, "merge", example="headrace checkpoint merge my-run@last ./model")
@click.argument("ref", metavar="REF")
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
def merge(ref: str, directory: Path, *, base: str | None, dtype: str, as_json: bool) -> None:
    """Merge a LoRA checkpoint into its base model.

    DIR becomes a plain Transformers directory that does not need PEFT. Merging runs on this machine and
    needs torch: pip install 'headrace[train]'.
    """
    from producers.cli.commands.merge import merge_checkpoint

    with Client() as client:
        made = merge_checkpoint(client, ref, directory, base=base, dtype=dtype)
    if as_json:
        print_json(made)
        return
    say(f"merged {made['ref']} into its base, in {directory} ({dtype})")
    _files(made)


@command(
    checkpoint, "chat", example="headrace checkpoint chat my-run@last --message 'What is 47 + 38?'"
)
@click.argument("ref", metavar="REF")
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
    ref: str, *, message: str | None, temperature: float, max_tokens: int, as_json: bool
) -> None:
    """Chat with a checkpoint."""
    if as_json and message is None:
        raise click.UsageError("--json needs --message; add --message TEXT")
    options = {"temperature": temperature, "max_tokens": max_tokens}
    with Client() as client:
        if message is not None:
            answer = _ask(client, ref, [{"role": "user", "content": message}], options)
            if as_json:
                print_json(answer)
            else:
                say(str(answer["message"]["content"]))
            return
        _talk(client, ref, options)


def _ask(
    client: Client, ref: str, messages: list[dict[str, str]], options: dict[str, float]
) -> Document:
    return client.post(f"/checkpoints/{path_segment(ref)}/chat", {"messages": messages, **options})


def _talk(client: Client, ref: str, options: dict[str, float]) -> None:
    say(f"chatting with {ref}; end with an empty line or Ctrl-D")
    messages: list[dict[str, str]] = []
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        reply = str(_ask(client, ref, messages, options)["message"]["content"])
        messages.append({"role": "assistant", "content": reply})
        say(printable(f"< {reply}"))


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
