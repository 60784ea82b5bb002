"""`headrace train tag|note`: what people write about runs."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command_tree import RUN, command
from producers.cli.display.output import print_json, say


@command(None, "tag", example="headrace train tag my-run baseline --remove draft")
@RUN
@click.argument("tags", metavar="[TAG]...", nargs=-1)
@click.option("--remove", multiple=True, metavar="TAG", help="Remove this tag. Can be repeated.")
def tag(run: str, tags: tuple[str, ...], *, remove: tuple[str, ...], as_json: bool) -> None:
    """Add tags to a run, or remove some.

    Without tags it shows those that the run has. `headrace train list --tag TAG` lists runs by tag.
    """
    path = f"/runs/{path_segment(run)}"
    with Client() as client:
        if tags or remove:
            body = {"add": list(tags), "remove": list(remove)}
            answer = client.post(f"{path}/tags", body)
        else:
            answer = client.get(path)
    if as_json:
        print_json({"run": answer["run"]})
        return
    found = answer["run"].get("tags") or []
    say(f"{run}: {' '.join(map(str, found)) or 'no tags'}")


@command(None, "note", example="headrace train note my-run 'lr too high from step 40'")
@RUN
@click.argument("text", required=False)
@click.option("--clear", is_flag=True, help="Remove the note.")
def note(run: str, text: str | None, *, clear: bool, as_json: bool) -> None:
    """Write a note on a run.

    It takes the place of the one that the run has. Without TEXT it shows the note.
    """
    if clear and text is not None:
        raise click.UsageError("--clear removes the note; leave TEXT out")
    path = f"/runs/{path_segment(run)}"
    with Client() as client:
        if clear or text is not None:
            answer = client.put_json(f"{path}/note", {"note": text or ""})
        else:
            answer = client.get(path)
    if as_json:
        print_json({"run": answer["run"]})
        return
    say(str(answer["run"].get("note") or f"{run} has no note"))
