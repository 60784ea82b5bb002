"""`headrace workspace`: the repositories that hold rollouts."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import LIMIT, OFFSET, group
from producers.cli.commands.workspaces.alerts import alerts
from producers.cli.commands.workspaces.connection import connect, disconnect, rotate_secret
from producers.cli.commands.workspaces.quotas import quotas
from producers.cli.display.output import Document, Output, Part, fields, say, table, time_ago
from producers.cli.display.units import distinct_names
from producers.cli.errors import Failure
from producers.cli.repository import address_of

workspace = group("workspace", "Git repositories with rollouts: register, list, examine, create.")

SYNC_S, INSTALL_S = 20.0, 600.0
WAITING = ("pending", "syncing", "installing")
ALWAYS_SHOWN = ("id", "url", "status", "commit_sha", "error")
ERRORS = ("refs_error", "push_error", "status_error")
SHOWN = (*ALWAYS_SHOWN, "organisation", "repository", "forge", "default_branch", "refs_at", *ERRORS)


@command(workspace, "add", example="headrace workspace add . --name sums")
@click.argument("path_or_url", metavar="PATH_OR_URL")
@click.option("--name", help="Name of the workspace. Default: the last part of its path or URL.")
@click.option("--organisation", metavar="NAME", help="Whose it is. Default: that of your API key.")
@click.option(
    "--repository",
    metavar="OWNER/REPO",
    help="Another name for it. Default: the last two parts of its URL.",
)
def add(
    client: Client,
    path_or_url: str,
    *,
    name: str | None,
    organisation: str | None,
    repository: str | None,
    as_json: bool,
) -> Output:
    """Register a git repository and check its rollouts.

    The server reads a path from its own disk, and fetches a URL.
    """
    wanted = {"name": name, "organisation": organisation, "repository": repository}
    body = {"url": address_of(path_or_url)} | {key: text for key, text in wanted.items() if text}
    made: Document = client.post("/workspaces", body)
    found = await_first_sync(client, made["workspace"], tell=ignore if as_json else say)
    waiting = (
        f"the workspace is still {found.get('status')}; look again with: headrace workspace info "
        f"{found.get('name')}"
    )
    is_waiting = found.get("status") in WAITING
    return Output({"workspace": found}, _describe(found), waiting if is_waiting else None)


@command(workspace, "repository", example="headrace workspace repository sums rivers/sums")
@click.argument("name", metavar="WORKSPACE")
@click.argument("repository", metavar="OWNER/REPO", required=False)
@click.option("--none", "is_none", is_flag=True, help="Take the name away.")
def set_repository(client: Client, name: str, repository: str | None, *, is_none: bool) -> Output:
    """Name a workspace after its repository.

    This is for a repository that moved to another owner: the name before is free again, and another
    workspace of the organisation that had the new name loses it.
    """
    if is_none == (repository is not None):
        raise Failure("INVALID_OPTION", "give either OWNER/REPO or --none")
    path = f"/workspaces/{path_segment(name)}/repository"
    changed = client.put_json(path, {} if is_none else {"repository": repository})
    return Output(changed, _describe(changed["workspace"]))


def ignore(text: str) -> None:
    """Tell nobody, because a program reads what is printed."""


def await_first_sync(
    client: Client, found: Document, *, tell: Callable[[str], None] = say
) -> Document:
    """Return the workspace after its first sync, or as it is when that takes longer than 20 s. While
    packages are installed it takes up to 10 minutes."""
    deadline = time.monotonic() + SYNC_S
    while found.get("status") in WAITING and time.monotonic() < deadline:
        time.sleep(0.2)
        before = found.get("status")
        found = client.get(f"/workspaces/{path_segment(str(found['id']))}")["workspace"]
        if found.get("status") == "installing" != before:
            deadline = time.monotonic() + INSTALL_S
            for rollout in found.get("rollouts") or ():
                tell(f"installing the packages of {_entrypoint(rollout)}: {_packages(rollout)}")
    return found


@command(workspace, "list", example="headrace workspace list")
@LIMIT
@OFFSET
def list_(client: Client, *, limit: int, offset: int) -> Output:
    """List the registered repositories."""
    answer = client.get("/workspaces", {"limit": limit, "offset": offset})
    rows = [
        (name, w.get("status"), str(w.get("commit_sha") or "")[:12], w.get("url"))
        for w, name in zip(answer["workspaces"], distinct_names(answer["workspaces"]), strict=True)
    ]
    return Output(answer, table("Workspaces", ("name", "status", "commit", "address"), rows))


@command(workspace, "info", example="headrace workspace info sums")
@click.argument("name", metavar="WORKSPACE")
def info(client: Client, name: str) -> Output:
    """Show a repository: its commit, and its workflows and graders."""
    answer = client.get(f"/workspaces/{path_segment(name)}")
    return Output(answer, _describe(answer["workspace"]))


def _describe(found: Document) -> Iterator[Part]:
    pairs = [(key, found.get(key)) for key in SHOWN if found.get(key) or key in ALWAYS_SHOWN]
    yield fields(f"Workspace {found.get('name')}", pairs)
    rows = [
        (
            _entrypoint(r),
            r.get("workflow"),
            r.get("grader"),
            ", ".join(r.get("rewards") or ()) or None,
            _packages(r),
            r.get("error"),
        )
        for r in found.get("rollouts") or ()
    ]
    if rows:
        names = ("entry point", "workflow", "grader", "rewards", "packages", "error")
        yield table("Rollouts", names, rows)


def _packages(rollout: Document) -> str | None:
    """The number of packages of a rollout, with their Python."""
    chosen = rollout.get("environment")
    if not isinstance(chosen, dict):
        return None
    return f"{chosen.get('packages') or 'none'} (Python {chosen.get('python')})"


def _entrypoint(rollout: Document) -> str:
    place = rollout.get("entrypoint")
    if isinstance(place, dict):
        return f"rollouts/{place.get('rollout')}/{place.get('path')}"
    return str(place or rollout.get("name"))


@command(workspace, "rollouts", example="headrace workspace rollouts sums --branch main")
@click.argument("name", metavar="WORKSPACE")
@click.option("--branch", help="Of this branch. Default: of the default branch.")
def rollouts(client: Client, name: str, *, branch: str | None) -> Output:
    """List the rollouts of a branch with their newest commits.

    A branch has those of the commits that were fetched for it, by runs or by pushes.
    """
    answer = client.get(f"/workspaces/{path_segment(name)}/rollouts", {"branch": branch})
    rows = [
        (
            _entrypoint(r),
            r.get("workflow"),
            r.get("grader"),
            str(r.get("commit_sha") or "")[:12],
            time_ago(r.get("synced_at")),
            r.get("error"),
        )
        for r in answer["rollouts"]
    ]
    names = ("entry point", "workflow", "grader", "commit", "examined", "error")
    return Output(answer, table("Rollouts", names, rows))


@command(workspace, "sync", example="headrace workspace sync sums")
@click.argument("name", metavar="WORKSPACE")
def sync(client: Client, name: str) -> Output:
    """Ask the repository for new commits now.

    Pushes that are found start runs, as if a webhook had told of them.
    """
    answer = client.post(f"/workspaces/{path_segment(name)}/sync", {})
    return Output(
        answer,
        f"asked {answer['workspace']['url']} for its refs; see: headrace workspace deliveries {name}",
    )


@command(workspace, "deliveries", example="headrace workspace deliveries sums")
@click.argument("name", metavar="WORKSPACE")
@LIMIT
@OFFSET
def deliveries(client: Client, name: str, *, limit: int, offset: int) -> Output:
    """List what arrived about a repository, and what it led to.

    An event `found` is a push that no webhook told of.
    """
    answer = client.get(
        f"/workspaces/{path_segment(name)}/deliveries", {"limit": limit, "offset": offset}
    )
    rows = [
        (d.get("at"), d.get("event"), d.get("ref"), str(d.get("after") or "")[:12], d.get("result"))
        for d in answer["deliveries"]
    ]
    return Output(answer, table("Deliveries", ("time", "event", "ref", "commit", "result"), rows))


for elsewhere in (connect, disconnect, rotate_secret, quotas, alerts):
    workspace.add_command(elsewhere)


@command(workspace, "init", example="headrace workspace init sums")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", default=0, show_default=True, help="Seed for the generated data.")
def init(directory: Path, *, seed: int) -> Output:
    """Create a workspace from the example.

    It has a rollout, configs and data, in a git repository with a first commit.
    """
    from producers.cli.scaffold import scaffold

    commit = scaffold(directory, seed=seed)
    uploads = [
        f"  headrace dataset upload data/arithmetic-{name}.jsonl"
        for name in ("sft", "rl", "heldout")
    ]
    return Output(
        {"directory": str(directory.resolve()), "commit_sha": commit},
        f"created {directory} (commit {commit[:12]}); next:\n  cd {directory}",
        "  headrace up --detach",
        uploads,
        "  headrace train submit configs/training/sft.toml --name arithmetic-sft --watch",
        "  headrace train submit configs/training/grpo.toml --name arithmetic-grpo --watch",
    )
