"""`headrace rollout init`, `list` and `validate`: the rollouts of a workspace as files."""

from pathlib import Path

import click

from producers.cli.command import command
from producers.cli.display.output import Document, Output, say, table
from producers.cli.errors import Failure
from producers.cli.rollouts.templates import TEMPLATES, make_rollout
from producers.cli.rollouts.tryout_process import run_tryout
from producers.cli.rollouts.workspace_files import (
    config_of,
    find_rollout,
    names_in,
    workspace_around,
)

MARKS = {"ok": "ok", "problem": "PROBLEM", "note": "note"}


@command(None, "init", example="headrace rollout init sums --template tools")
@click.argument("name", metavar="NAME")
@click.option(
    "--template",
    default="single",
    show_default=True,
    metavar="NAME",
    help=f"One of: {', '.join(TEMPLATES)}.",
)
def init(name: str, *, template: str) -> Output:
    """Make a new rollout in this workspace.

    It writes code, a config and a small dataset. In a directory without rollouts, that directory
    becomes the workspace.
    """
    try:
        workspace = workspace_around(Path.cwd())
    except Failure:
        workspace = Path.cwd()
    made = [path.relative_to(workspace) for path in make_rollout(workspace, name, template)]
    return Output(
        {"rollout": name, "template": template, "files": [str(path) for path in made]},
        (f"wrote {path}" for path in made),
        f"try it with: headrace rollout test {name}",
    )


@command(None, "list", example="headrace rollout list")
def list_() -> Output:
    """List the rollouts of this workspace, with their configs and packages."""
    workspace = workspace_around(Path.cwd())
    found = [_entry(workspace, name) for name in names_in(workspace)]
    rows = [(r["name"], r["config"], ", ".join(r["packages"]) or None) for r in found]
    return Output(
        {"workspace": str(workspace), "rollouts": found},
        table(f"Rollouts of {workspace}", ("name", "config", "packages"), rows),
    )


def _entry(workspace: Path, name: str) -> Document:
    config = config_of(workspace, name)
    return {
        "name": name,
        "config": str(config.relative_to(workspace)) if config else None,
        "packages": _packages(workspace / "rollouts" / name / "pyproject.toml"),
    }


def _packages(path: Path) -> list[str]:
    """The packages that a pyproject.toml names. Empty when it cannot be read; `validate` says why."""
    import tomllib

    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        return [str(one) for one in project.get("dependencies", [])]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


@command(None, "validate", example="headrace rollout validate sums")
@click.argument("name", metavar="NAME")
@click.option(
    "--config", type=click.Path(path_type=Path), help="Default: configs/training/NAME.toml."
)
@click.option("--dataset", type=click.Path(path_type=Path), help="Default: the config's, in data/.")
def validate(name: str, *, config: Path | None, dataset: Path | None, as_json: bool) -> Output:
    """Check a rollout: code, packages, MCP servers, config and dataset.

    The code is imported in a sandbox, as a sync does. It needs no server.
    """
    request = {
        **find_rollout(name, config).request(),
        "mode": "validate",
        "dataset": str(dataset.resolve()) if dataset else None,
    }
    checks: list[Document] = []
    for document in run_tryout(request):
        checks += document.get("checks") or ()
        if "note" in document and not as_json:
            say(f"{document['note']} ...")
    is_valid = all(check["status"] != "problem" for check in checks)
    rows = [(c["what"], MARKS.get(c["status"]), c["message"]) for c in checks]
    return Output(
        {"rollout": name, "valid": is_valid, "checks": checks},
        table(f"Rollout {name}", ("checked", "", "found"), rows),
        exit_code=0 if is_valid else 1,
    )
