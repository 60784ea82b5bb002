"""`headrace dlq`: dead letters, the messages that a consumer failed to process."""

import base64
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import group
from producers.cli.display.output import (
    Document,
    Output,
    fields,
    one_line,
    table,
    time_ago,
)
from producers.cli.display.units import format_size

dlq = group("dlq", "Dead letters: messages that a consumer failed to process.")


@command(dlq, "list", example="headrace dlq list")
@click.option(
    "--all", "everything", is_flag=True, help="Include dead letters that were already redriven."
)
@click.option("--run", metavar="RUN_ID", help="Only dead letters about this run.")
def list_(client: Client, *, everything: bool, run: str | None) -> Output:
    """List the dead letters, newest first."""
    parameters = {"status": "all" if everything else "waiting", "about": run}
    letters = list(client.pages("/dead-letters", "dead_letters", parameters))
    rows = [
        (
            str(letter.get("id"))[:13],
            letter.get("consumer"),
            letter.get("message_type"),
            letter.get("about"),
            "held" if letter.get("pauses") and not letter.get("redriven_at") else "-",
            time_ago(letter.get("redriven_at") or letter.get("created_at")),
            one_line(str(letter.get("cause"))),
        )
        for letter in letters
    ]
    columns = ("id", "consumer", "message", "about", "run", "since", "cause")
    return Output(
        {"dead_letters": letters, "total_count": len(letters)},
        table("Dead letters", columns, rows, empty="no dead letters"),
    )


@command(dlq, "show", example="headrace dlq show 0b8f6d0f-7a1")
@click.argument("ref", metavar="ID")
@click.option(
    "--bytes",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Save the exact bytes of the message to FILE.",
)
def show(client: Client, ref: str, *, target: Path | None) -> Output:
    """Show a dead letter: cause, traceback, headers, bytes."""
    letter: Document = client.get(f"/dead-letters/{path_segment(ref)}")["dead_letter"]
    data = base64.b64decode(letter["bytes_base64"])
    if target is not None:
        target.write_bytes(data)
    keys = (
        *("id", "consumer", "message_type", "message_id", "message_stream", "message_version"),
        *("about", "cause", "created_at", "redriven_at", "traceparent", "size"),
    )
    saved = f"saved {format_size(len(data))} in {target}"
    return Output(
        {"dead_letter": letter},
        fields(f"Dead letter {ref}", [(key, letter.get(key)) for key in keys]),
        fields("Headers", sorted(letter["headers"].items())),
        letter["trace"] or None,
        data.decode(errors="backslashreplace") if target is None else saved,
    )


@command(dlq, "redrive", example="headrace dlq redrive 0b8f6d0f-7a1")
@click.argument("refs", metavar="ID...", nargs=-1, required=True)
def redrive(client: Client, refs: tuple[str, ...]) -> Output:
    """Deliver dead letters to their consumers again.

    Do this after the cause is fixed. Each message goes to the consumer that failed on it, and its run
    continues. A message that fails again becomes a new dead letter.
    """
    driven = [
        client.post(f"/dead-letters/{path_segment(ref)}/redrive")["dead_letter"] for ref in refs
    ]
    lines = [
        f"redelivered {letter['message_type']} to {letter['consumer']} ({letter['id']})"
        for letter in driven
    ]
    return Output({"dead_letters": driven}, lines)
