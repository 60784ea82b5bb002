"""`headrace train submit`: start a run from a TOML file and a git commit."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from producers.cli.client import Client
from producers.cli.command import command
from producers.cli.command_tree import SECRETS_FILE
from producers.cli.config_files import check_kind, needs_workspace, read_config, read_secrets
from producers.cli.datasets.generated import upload_datasets_of
from producers.cli.display.output import (
    Document,
    Output,
    print_fields,
    print_table,
    say,
    say_warnings,
)
from producers.cli.display.units import format_count, format_duration, format_size
from producers.cli.repository import repository_around, workspace_of


@command(None, "submit", example="headrace train submit configs/training/grpo.toml --watch")
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option(
    "--watch", is_flag=True, help="Watch the run until it ends. Ctrl-C stops watching only."
)
@click.option(
    "--dry-run", is_flag=True, help="Only show the resolved config and estimates; submit nothing."
)
@click.option("--from", "start", metavar="RUN@STEP", help="Start from this checkpoint.")
@click.option(
    "--priority",
    type=click.IntRange(1, 100),
    help="Share of the run where runs take turns. Default: CONFIG's advanced.priority, or 1.",
)
@click.option(
    "--allow-divergence",
    is_flag=True,
    help="Go on as a recorded fork when other hardware gives a repeated step other bits.",
)
@SECRETS_FILE
@click.option("--name", help="Name of the run. Default: chosen by the server.")
@click.option("--project", help="The label project of the run; it replaces that of CONFIG.")
@click.option(
    "--workspace",
    help="Workspace whose code runs. Default: the git repository that contains CONFIG.",
)
def submit(
    client: Client,
    config: Path,
    *,
    watch: bool,
    dry_run: bool,
    start: str | None,
    priority: int | None,
    allow_divergence: bool,
    secrets_file: str | None,
    name: str | None,
    project: str | None,
    workspace: str | None,
    as_json: bool,
) -> Output | None:
    """Start a training run from a TOML file.

    The code that runs is a commit of the git repository that contains CONFIG: the current one, unless
    CONFIG names another. The repository is looked up on the server by its path or its origin, and
    registered when it is new.
    """
    document, secrets = read_config(config), read_secrets(secrets_file)
    check_kind(document, config, group="train")
    given = {
        "priority": priority,
        "allow_divergence": allow_divergence or None,
        "project": project,
    }
    keys = {key: value for key, value in given.items() if value is not None}
    advanced = document.setdefault("advanced", {}) if keys else None
    if isinstance(advanced, dict):  # the server says what is wrong with anything else
        advanced.update(keys)
    place = workspace or _find_workspace(client, config, document, quiet=as_json)
    submit_it = partial(
        submit_run, client, document, workspace=place, name=name, start=start, secrets=secrets
    )
    if dry_run:
        answer = submit_it(dry_run=True)
        return Output(answer, partial(_print_dry_run, answer))
    upload_datasets_of(client, document, quiet=as_json)
    answer = submit_it()
    run: Document = answer["run"]
    if not as_json:
        say_warnings(answer)
        say(f"submitted {run['name']} ({run['id']})")
    if watch:
        from producers.cli.watch import watch_run

        watch_run(client, str(run["id"]), str(run["name"]), as_json=as_json)
        return None
    document = {"run": run, "warnings": answer.get("warnings") or []}
    return Output(document, f"watch it with: headrace train watch {run['name']}")


def _find_workspace(client: Client, config: Path, document: Document, *, quiet: bool) -> str | None:
    """The id of the workspace whose code the run needs; None when it needs none."""
    if not needs_workspace(document):
        return None
    repository = repository_around(config)
    changed = repository.changed[:5]
    if changed and not quiet:
        say(f"note: these changes are not committed and not part of the run: {', '.join(changed)}")
    return workspace_of(client, repository, document, quiet=quiet)


def submit_run(
    client: Client,
    config: Document,
    *,
    workspace: str | None = None,
    name: str | None = None,
    start: str | None = None,
    secrets: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> Document:
    """Submit a run, with secrets for it alone; returns the server's response. Raises Failure."""
    more = {
        "workspace": workspace,
        "name": name,
        "from": start,
        "secrets": secrets or None,
        "dry_run": dry_run or None,
    }
    body = {"config": config} | {key: value for key, value in more.items() if value is not None}
    return client.post("/runs", body)


def _print_dry_run(answer: Document) -> None:
    title = "Resolved config (* differs from the default)"
    print_table(title, ("", "section", "key", "value"), _config_rows(answer["config"]))
    say_warnings(answer)
    estimates = _estimates(answer.get("estimates") or {})
    print_fields("Estimates", [("steps", answer.get("total_steps")), *estimates])


def _config_rows(config: Document) -> list[tuple[str, str, str, object]]:
    """The keys that the algorithm of a config reads, each with `*` if its value is not the default."""
    from schemas.algorithms import READ_BY
    from schemas.config import RunConfig

    advanced = config.get("advanced") or {}
    algorithm = (
        advanced.get("algorithm")
        or RunConfig.model_fields["advanced"].get_default(call_default_factory=True).algorithm
    )
    unread = _unread_keys(config)
    rows = []
    for section, keys in config.items():
        for key, value in (keys or {}).items():
            is_read = section != "advanced" or algorithm in READ_BY.get(key, (algorithm,))
            if value is not None and is_read and f"{section}.{key}" not in unread:
                mark = "" if _is_default(section, key, value) else "*"
                rows.append((mark, section, key, value))
    return rows


def _unread_keys(config: Document) -> frozenset[str]:
    """The keys of a resolved config that its run does not read; none if a newer server has keys that
    this version does not know."""
    from pydantic import ValidationError

    from schemas.config import RunConfig
    from schemas.toml.unread_keys import unread_issues

    try:
        resolved = RunConfig.model_validate_json(json.dumps(config))  # a list of JSON is a tuple
        return frozenset(issue.key for issue in unread_issues(resolved))
    except ValidationError:
        return frozenset()


def _is_default(section: str, key: str, value: object) -> bool:
    """Whether a key has the value that it has if nobody sets it."""
    from pydantic import BaseModel

    from schemas.config import RunConfig

    field = RunConfig.model_fields.get(section)
    kind = field.annotation if field else None
    if not isinstance(kind, type) or not issubclass(kind, BaseModel):
        return False
    known = kind.model_fields.get(key)
    if known is None or known.is_required():
        return False
    default = known.get_default(call_default_factory=True)
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _estimates(found: Document) -> list[tuple[str, object]]:
    """The estimates as pairs of a name and a value with its unit."""
    if found.get("parameters") is None:
        return [("memory", "unknown: the model does not state its size")]
    shown: list[tuple[str, object]] = [
        ("parameters", format_count(found["parameters"])),
        ("memory", format_size(found.get("memory_bytes"))),
    ]
    if found.get("step_s") is not None:
        shown.append(("a step", format_duration(found["step_s"])))
        shown.append(("in all", format_duration(found["total_s"])))
    return [*shown, ("assumes", found.get("assumes"))]
