"""`headrace dlq`: dead letters, the messages that a consumer failed to process."""

import base64
import sys
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command_tree import command, group
from producers.cli.display.output import (
    Document,
    one_line,
    print_fields,
    print_json,
    print_table,
    say,
    time_ago,
)
from producers.cli.display.units import format_size

dlq = group("dlq", "Dead letters: messages that a consumer failed to process.")


@command(dlq, "list", example="headrace dlq list")
@click.option(
    "--all", "everything", is_flag=True, help="Include dead letters that were already redriven."
)
@click.option("--run", metavar="RUN_ID", help="Only dead letters about this run.")
def list_(*, everything: bool, run: str | None, as_json: bool) -> None:
    """List the dead letters, newest first."""
    parameters = {"status": "all" if everything else "waiting", "about": run}
    with Client() as client:
        letters = list(client.pages("/dead-letters", "dead_letters", parameters))
    if as_json:
        print_json({"dead_letters": letters, "total_count": len(letters)})
        return
    if not letters:
        say("no dead letters")
        return
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
    print_table(
        "Dead letters", ("id", "consumer", "message", "about", "run", "since", "cause"), rows
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
def show(ref: str, *, target: Path | None, as_json: bool) -> None:
    """Show a dead letter: cause, traceback, headers, bytes."""
    with Client() as client:
        letter: Document = client.get(f"/dead-letters/{path_segment(ref)}")["dead_letter"]
    data = base64.b64decode(letter["bytes_base64"])
    if target is not None:
        target.write_bytes(data)
    if as_json:
        print_json({"dead_letter": letter})
        return
    keys = (
        *("id", "consumer", "message_type", "message_id", "message_stream", "message_version"),
        *("about", "cause", "created_at", "redriven_at", "traceparent", "size"),
    )
    print_fields(f"Dead letter {ref}", [(key, letter.get(key)) for key in keys])
    print_fields("Headers", sorted(letter["headers"].items()))
    if letter["trace"]:
        say(letter["trace"])
    if target is not None:
        say(f"saved {format_size(len(data))} in {target}")
    else:
        say(data.decode(errors="backslashreplace"))


@command(dlq, "redrive", example="headrace dlq redrive 0b8f6d0f-7a1")
@click.argument("refs", metavar="ID...", nargs=-1, required=True)
def redrive(refs: tuple[str, ...], *, as_json: bool) -> None:
    """Deliver dead letters to their consumers again.

    Do this after the cause is fixed. Each message goes to the consumer that failed on it, and its run
    continues. A message that fails again becomes a new dead letter.
    """
    with Client() as client:
        driven = [
            client.post(f"/dead-letters/{path_segment(ref)}/redrive")["dead_letter"] for ref in refs
        ]
    if as_json:
        print_json({"dead_letters": driven})
        return
    for letter in driven:
        say(f"redelivered {letter['message_type']} to {letter['consumer']} ({letter['id']})")
    sys.stdout.flush()
