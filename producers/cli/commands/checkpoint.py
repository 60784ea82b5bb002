"""`headrace checkpoint`: what training leaves behind. REF is RUN@STEP, RUN@last or RUN@best."""

from pathlib import Path

import click

from producers.cli.checkpoint_files import fetch_file, name_local_base
from producers.cli.client import Client, path_segment
from producers.cli.command_tree import command, group
from producers.cli.display.output import (
    Document,
    print_fields,
    print_json,
    print_table,
    printable,
    say,
    time_ago,
)
from producers.cli.display.units import format_size
from producers.cli.errors import Failure

checkpoint = group("checkpoint", "Checkpoints: list, look into, download, merge, talk to.")


@command(checkpoint, "list", example="headrace checkpoint list my-run")
@click.argument("run", metavar="RUN")
def list_(run: str, *, as_json: bool) -> None:
    """The checkpoints of a run."""
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
            time_ago(c.get("created_at")),
        )
        for c in answer["checkpoints"]
    ]
    print_table(f"Checkpoints of {run}", ("ref", "reward", "weights sha256", "made"), rows)


@command(checkpoint, "info", example="headrace checkpoint info my-run@last")
@click.argument("ref", metavar="REF")
def info(ref: str, *, as_json: bool) -> None:
    """A checkpoint: its manifest's hash, and every file with size and hash."""
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


@command(checkpoint, "download", example="headrace checkpoint download my-run@last ./adapter")
@click.argument("ref", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Write into a directory that is not empty.")
def download(ref: str, directory: Path, *, force: bool, as_json: bool) -> None:
    """Save a checkpoint's files, each verified against its hash.

    The directory loads in plain Transformers, and an adapter in plain Transformers + PEFT. An adapter
    whose base model has no public name brings it along in DIR/base, and adapter_config.json then names
    that directory: if you move DIR, run PEFT with the base given explicitly, or download again.
    """
    if directory.exists() and any(directory.iterdir()) and not force:
        raise Failure("CONFLICT", f"{directory} is not empty; name a new one, or give --force")
    with Client() as client:
        found: Document = client.get(f"/checkpoints/{path_segment(ref)}")["checkpoint"]
        exact = path_segment(str(found.get("ref") or ref))
        for file in found["files"]:
            fetch_file(client, exact, file, directory)
    base = name_local_base(directory)
    if as_json:
        document = {"directory": str(directory.resolve()), "checkpoint": found}
        print_json({**document, "base": str(base) if base else None})
        return
    say(f"saved {found.get('ref')} in {directory}, every file's sha256 verified")
    if base is not None:
        say(f"adapter_config.json now names its base model: {base}")
    _files(found)


@command(checkpoint, "merge", example="headrace checkpoint merge my-run@last ./model")
@click.argument("ref", metavar="REF")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--base", metavar="MODEL", help="Its base model on this machine: a directory or a hub id."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of the weights in DIR; they are merged in float32.",
)
def merge(ref: str, directory: Path, *, base: str | None, dtype: str, as_json: bool) -> None:
    """Merge a LoRA checkpoint into its base model: one plain Transformers directory, no PEFT needed.

    It runs on this machine and needs torch here (pip install 'headrace[train]').
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
@click.option("--message", help="Ask this once, instead of talking.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True)
def chat(
    ref: str, *, message: str | None, temperature: float, max_tokens: int, as_json: bool
) -> None:
    """Talk to a checkpoint."""
    if as_json and message is None:
        raise click.UsageError("--json needs --message: a program does not talk")
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
    say(f"talking to {ref}; an empty line or Ctrl-D ends it")
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
