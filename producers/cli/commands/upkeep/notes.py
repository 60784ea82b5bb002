"""`headrace train tag|note|share`: what people write about runs, and links that show them."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import RUN
from producers.cli.display.output import Output, table, time_ago


@command(None, "tag", example="headrace train tag my-run baseline --remove draft")
@RUN
@click.argument("tags", metavar="[TAG]...", nargs=-1)
@click.option("--remove", multiple=True, metavar="TAG", help="Remove this tag. Can be repeated.")
def tag(client: Client, run: str, tags: tuple[str, ...], *, remove: tuple[str, ...]) -> Output:
    """Add tags to a run, or remove some.

    Without tags it shows those that the run has. `headrace train list --tag TAG` lists runs by tag.
    """
    path = f"/runs/{path_segment(run)}"
    if tags or remove:
        body = {"add": list(tags), "remove": list(remove)}
        answer = client.post(f"{path}/tags", body)
    else:
        answer = client.get(path)
    found = answer["run"].get("tags") or []
    return Output({"run": answer["run"]}, f"{run}: {' '.join(map(str, found)) or 'no tags'}")


@command(None, "note", example="headrace train note my-run 'lr too high from step 40'")
@RUN
@click.argument("text", required=False)
@click.option("--clear", is_flag=True, help="Remove the note.")
def note(client: Client, run: str, text: str | None, *, clear: bool) -> Output:
    """Write a note on a run.

    It takes the place of the one that the run has. Without TEXT it shows the note.
    """
    if clear and text is not None:
        raise click.UsageError("--clear removes the note; leave TEXT out")
    path = f"/runs/{path_segment(run)}"
    if clear or text is not None:
        answer = client.put_json(f"{path}/note", {"note": text or ""})
    else:
        answer = client.get(path)
    return Output({"run": answer["run"]}, str(answer["run"].get("note") or f"{run} has no note"))


@command(None, "share", example="headrace train share my-run --days 7")
@RUN
@click.option("--days", type=click.IntRange(1, 90), help="How long the link works. Default: 7.")
@click.option("--list", "is_list", is_flag=True, help="Show the links that are open.")
@click.option("--revoke", metavar="ID", help="Close this link at once.")
def share(
    client: Client, run: str, *, days: int | None, is_list: bool, revoke: str | None
) -> Output:
    """Make a link that shows one run to everyone who has it.

    It shows figures and curves, without signing in, and no samples, log or config. It is printed only
    once.
    """
    if (days is not None) + is_list + (revoke is not None) > 1:
        raise click.UsageError("use one of --days, --list and --revoke")
    path = f"/runs/{path_segment(run)}/shares"
    if is_list:
        answer = client.get(path)
        rows = [
            (one["id"], one["created_by"], time_ago(one["created_at"]), one["expires_at"])
            for one in answer["shares"]
        ]
        return Output(answer, table(f"Links to {run}", ("id", "made by", "made", "expires"), rows))
    if revoke is not None:
        return Output(client.delete(f"{path}/{path_segment(revoke)}"), f"revoked {revoke}")
    answer = client.post(path, {} if days is None else {"days": days})
    return Output(
        answer,
        str(answer["url"]),
        f"It works until {answer['expires_at']}; `headrace train share {run} --list` shows it.",
    )
