"""`headrace train tag|note|share`: what people write about runs, and links that show them."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command_tree import RUN, command
from producers.cli.display.output import print_json, print_table, say, time_ago


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


@command(None, "share", example="headrace train share my-run --days 7")
@RUN
@click.option("--days", type=click.IntRange(1, 90), help="How long the link works. Default: 7.")
@click.option("--list", "is_list", is_flag=True, help="Show the links that are open.")
@click.option("--revoke", metavar="ID", help="Close this link at once.")
def share(run: str, *, days: int | None, is_list: bool, revoke: str | None, as_json: bool) -> None:
    """Make a link that shows one run to everyone who has it.

    It shows figures and curves, without signing in, and no samples, log or config. It is printed only
    once.
    """
    if (days is not None) + is_list + (revoke is not None) > 1:
        raise click.UsageError("use one of --days, --list and --revoke")
    path = f"/runs/{path_segment(run)}/shares"
    with Client() as client:
        if is_list:
            answer = client.get(path)
        elif revoke is not None:
            answer = client.delete(f"{path}/{path_segment(revoke)}")
        else:
            answer = client.post(path, {} if days is None else {"days": days})
    if as_json:
        print_json(answer)
    elif is_list:
        rows = [
            (one["id"], one["created_by"], time_ago(one["created_at"]), one["expires_at"])
            for one in answer["shares"]
        ]
        print_table(f"Links to {run}", ("id", "made by", "made", "expires"), rows)
    elif revoke is not None:
        say(f"revoked {revoke}")
    else:
        say(str(answer["url"]))
        say(f"It works until {answer['expires_at']}; `headrace train share {run} --list` shows it.")
