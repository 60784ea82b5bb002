"""`headrace org`: organisations, which share an installation and see nothing of each other."""

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import group
from producers.cli.display.output import Document, Output, Part, fields, table, time_ago
from producers.cli.display.quotas import limits_of, quotas_table

organisation = group("org", "Organisations: create, list, show, quotas, rename.")

COLUMNS = ("id", "name", "title", "created_by")


@command(organisation, "create", example="headrace org create rivers --title 'Team Rivers'")
@click.argument("name", metavar="NAME")
@click.option("--title", metavar="TEXT", help="The title that people read. Default: the name.")
def create(client: Client, name: str, *, title: str | None) -> Output:
    """Make an organisation.

    Its name is a key of a-z, 0-9 and '-' and does not change. This needs an API key of the whole
    installation.
    """
    made = client.post("/organisations", {"name": name} | ({"title": title} if title else {}))
    next_step = f"make an API key for it: headrace key create NAME --organisation {name}"
    return Output(made, _describe(made["organisation"]), next_step)


@command(organisation, "list", example="headrace org list")
def list_(client: Client) -> Output:
    """List the organisations that your API key may see."""
    found = client.get("/organisations")
    rows = [
        (one["name"], one["title"], one["id"], time_ago(one["created_at"]))
        for one in found["organisations"]
    ]
    return Output(found, table("Organisations", ("name", "title", "id", "made"), rows))


@command(organisation, "show", example="headrace org show rivers")
@click.argument("ref", metavar="NAME|ID")
def show(client: Client, ref: str) -> Output:
    """Show an organisation: its workspaces, and its limits with their use."""
    found = client.get(f"/organisations/{path_segment(ref)}")
    rows = [(one["name"], one["repository"], one["url"]) for one in found["workspaces"]]
    columns = ("name", "repository", "address")
    empty = f"no workspaces; `headrace workspace add URL --organisation {ref}` adds one"
    shown = [_describe(found["organisation"]), table("Workspaces", columns, rows, empty=empty)]
    if found.get("quotas"):
        shown.append(quotas_table(found["organisation"]["name"], found["quotas"]))
    return Output(found, shown)


@command(organisation, "quotas", example="headrace org quotas rivers --set members=20")
@click.argument("ref", metavar="NAME|ID")
@click.option(
    "--set",
    "limits",
    multiple=True,
    metavar="QUOTA=LIMIT",
    help="Let it use this much: a number, unlimited or default. For the operator.",
)
def quotas(client: Client, ref: str, *, limits: tuple[str, ...]) -> Output:
    """Show the limits of an organisation and their use."""
    path, wanted = f"/organisations/{path_segment(ref)}/quotas", limits_of(limits)
    found = client.post(path, {"limits": wanted}) if wanted else client.get(path)
    return Output(found, quotas_table(found["organisation"], found["quotas"]))


@command(organisation, "rename", example="headrace org rename rivers 'Team Rivers and Lakes'")
@click.argument("ref", metavar="NAME|ID")
@click.argument("title", metavar="TITLE")
def rename(client: Client, ref: str, title: str) -> Output:
    """Give an organisation another title. Its name stays."""
    changed = client.put_json(f"/organisations/{path_segment(ref)}", {"title": title})
    return Output(changed, _describe(changed["organisation"]))


def _describe(found: Document) -> Part:
    return fields(f"Organisation {found['name']}", [(key, found[key]) for key in COLUMNS])
