"""`headrace train submit` and `train fork`: start a run from a TOML file and a git commit, or from the
middle of another run."""

import json
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import SECRETS_FILE
from producers.cli.config_files import check_kind, needs_workspace, read_config, read_secrets
from producers.cli.datasets.generated import upload_datasets_of
from producers.cli.display.costs import past_facts
from producers.cli.display.output import (
    Document,
    Output,
    print_fields,
    print_table,
    say,
    say_warnings,
)
from producers.cli.display.units import format_count, format_duration, format_size
from producers.cli.errors import Failure
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
    help="Go on with a recorded divergence when other hardware gives a repeated step other bits.",
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


@command(None, "fork", example="headrace train fork first@20 --set training.lr=1e-5 --watch")
@click.argument("place", metavar="RUN@STEP|RUN@EVENT")
@click.option("--set", "changes", metavar="KEY=VALUE", multiple=True, help="Change a key.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="A TOML file in place of the parent's config."
)
@click.option("--grader", "commit", metavar="COMMIT", help="Run and grade with this commit.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), help="Draw rows and samples with this seed."
)
@click.option(
    "--replay-samples",
    is_flag=True,
    help="Train on the parent's recorded samples as long as its weights are those of the fork.",
)
@click.option("--dry-run", is_flag=True, help="Only show what the fork would change.")
@click.option("--watch", is_flag=True, help="Watch the fork until it ends.")
@SECRETS_FILE
@click.option("--name", help="Name of the fork. Default: PARENT-fork-N.")
def fork(
    client: Client,
    place: str,
    *,
    changes: tuple[str, ...],
    config: Path | None,
    commit: str | None,
    seed: int | None,
    replay_samples: bool,
    dry_run: bool,
    watch: bool,
    secrets_file: str | None,
    name: str | None,
    as_json: bool,
) -> Output | None:
    """Start a run from the middle of another one.

    The new run, a fork, begins with the state that the other one had after a step.
    RUN@STEP forks right after that step. RUN@EVENT (the id or the cursor of an event, as `headrace
    events RUN --json` shows it) forks after the newest step that was settled at the event. No artifact
    is copied. The fork runs the parent's commit with the parent's config, except for what you change.
    """
    run, mark, at = place.rpartition("@")
    if not (run and mark and at):
        example = f"{place.strip('@') or 'first'}@20"
        raise Failure(
            "VALIDATION",
            f"{place!r} names no step or event; write RUN@STEP, for example {example}",
        )
    body: Document = {"at": at, "set": dict(_change(text) for text in changes)}
    more: Document = {
        "config": read_config(config) if config else None,
        "commit": commit,
        "seed": seed,
        "replay_samples": replay_samples or None,
        "name": name,
        "secrets": read_secrets(secrets_file) or None,
        "dry_run": dry_run or None,
    }
    body |= {key: value for key, value in more.items() if value is not None}
    answer = client.post(f"/runs/{path_segment(run)}/fork", body)
    if dry_run:
        return Output(answer, partial(_print_fork_plan, answer))
    if not as_json:
        _print_fork(answer)
        say(
            f"forked {answer['fork']['parent_name']} as {answer['run']['name']} ({answer['run']['id']})"
        )
    made = answer["run"]
    if watch:
        from producers.cli.watch import watch_run

        watch_run(client, str(made["id"]), str(made["name"]), as_json=as_json)
        return None
    return Output(answer, f"watch it with: headrace train watch {made['name']}")


def _change(text: str) -> tuple[str, object]:
    """A change of a key, whose value is one of TOML or else a string. Raises Failure."""
    key, mark, value = text.partition("=")
    if not (key and mark):
        raise Failure(
            "VALIDATION",
            f"--set {text} has no value; write KEY=VALUE, for example training.lr=1e-5",
        )
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _print_fork(answer: Document) -> None:
    """Say what a fork changes and what it does again."""
    found = answer["fork"]
    rows = [
        (change["key"], change["parent"], change["child"], f"step {change['from_step']} on")
        for change in found["changes"]
    ]
    if rows:
        print_table("Changes", ("key", "parent", "fork", "matters from"), rows)
    else:
        say("the fork changes nothing: it ends in the bits of its parent")
    for note in found["notes"]:
        say(f"note: {note}")
    say_warnings(answer)


def _print_fork_plan(answer: Document) -> None:
    _print_fork(answer)
    found = answer["fork"]
    steps = f"{found['step'] + 1} to {found['total_steps']}"
    print_fields("Estimates", [("steps", steps), *_estimates(answer.get("estimates") or {})])


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
    past = past_facts(found["past"]) if found.get("past") else []
    if found.get("parameters") is None:
        return [("memory", "unknown: the model does not state its size"), *past]
    shown: list[tuple[str, object]] = [
        ("parameters", format_count(found["parameters"])),
        ("memory", format_size(found.get("memory_bytes"))),
    ]
    if found.get("step_s") is not None:
        shown.append(("a step", format_duration(found["step_s"])))
        shown.append(("in all", format_duration(found["total_s"])))
    return [*shown, ("assumes", found.get("assumes")), *past]
