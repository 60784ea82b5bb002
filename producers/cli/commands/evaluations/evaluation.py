"""`headrace eval`: measure a model or checkpoint on a dataset."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from infra.readmodel.estimates import interval_of
from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import LIMIT, OFFSET, SECRETS_FILE, group
from producers.cli.commands.evaluations.local_evaluation import import_results
from producers.cli.commands.evaluations.report import run
from producers.cli.commands.evaluations.results import ENDED, EVAL, compare, download, samples
from producers.cli.commands.evaluations.saved_files import files, summary_table
from producers.cli.config_files import check_kind, read_config, read_secrets
from producers.cli.datasets.generated import upload_datasets_of
from producers.cli.display.confirm import confirm
from producers.cli.display.figures import COLUMNS, figure_rows, interval_text
from producers.cli.display.output import (
    Document,
    Output,
    Part,
    console,
    fields,
    say,
    say_warnings,
    table,
    time_ago,
)
from producers.cli.display.units import distinct_names
from producers.cli.errors import Failure, Interrupted
from producers.cli.event_stream import AWAY, Outage
from producers.cli.repository import repository_around, workspace_of

if TYPE_CHECKING:
    from rich.progress import Progress

evaluation = group("eval", "Evaluations of a model or checkpoint on a dataset.")

POLL_S = 0.3
TENTHS = 10
LEFT_OUT = "eval/left_out"
OLD_FIGURES = (
    "These figures leave out every attempt that failed, because they were computed before failures of "
    "the policy counted; submit the evaluation again to compare it with others."
)
CRASHES_PAY = (
    "Attempts that failed count as 0, which is more than this mean reward; give wrong answers 0, and "
    "good ones more, so that a policy that crashes does not score better."
)


@command(evaluation, "submit", example="headrace eval submit configs/eval/greedy.toml --watch")
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--name", help="Name of the evaluation. Default: chosen by the server.")
@click.option("--project", help="The label project of the evaluation; it replaces that of CONFIG.")
@click.option(
    "--workspace",
    help="Workspace whose code runs. Default: the git repository that contains CONFIG.",
)
@SECRETS_FILE
@click.option("--watch", is_flag=True, help="Wait until the evaluation ends.")
def submit(
    client: Client,
    config: Path,
    *,
    name: str | None,
    project: str | None,
    workspace: str | None,
    secrets_file: str | None,
    watch: bool,
    as_json: bool,
) -> Output:
    """Start an evaluation from a TOML file."""
    document, secrets = read_config(config), read_secrets(secrets_file)
    check_kind(document, config, group="eval")
    if project is not None:
        advanced = document.setdefault("advanced", {})
        if isinstance(advanced, dict):  # the server says what is wrong with anything else
            advanced["project"] = project
    place = workspace
    if place is None:
        place = workspace_of(client, repository_around(config), document, quiet=as_json)
    upload_datasets_of(client, document, quiet=as_json)
    answer = submit_evaluation(client, document, workspace=place, name=name, secrets=secrets)
    started: Document = answer["eval"]
    if not as_json:
        say_warnings(answer)
    if watch:
        ended = watch_evaluation(client, started, quiet=as_json)
        return Output({"eval": ended}, _describe(ended), failure=_failure(ended))
    said = f"started {started['name']}; show it with: headrace eval info {started['name']}"
    return Output({"eval": started}, said)


def submit_evaluation(
    client: Client,
    config: Document,
    *,
    workspace: str,
    name: str | None = None,
    secrets: Mapping[str, str] | None = None,
) -> Document:
    """Start an evaluation, with secrets for it alone; returns the server's response. Raises Failure."""
    given = {"name": name, "secrets": secrets}
    body = {"config": config, "workspace": workspace}
    return client.post("/evals", body | {key: value for key, value in given.items() if value})


def wait_for_end(client: Client, ref: str, *, each: Callable[[Document], None]) -> Document:
    """Wait for the end of the evaluation and return it, also while the server restarts; `each` is called
    with every intermediate state. Raises Failure."""
    outage = Outage(lambda: None)
    while True:
        try:
            found: Document = client.get(f"/evals/{path_segment(ref)}")["eval"]
        except Failure as failure:
            if failure.code not in AWAY or outage.is_too_long():
                raise
        else:
            outage.end()
            each(found)
            if found.get("status") in ENDED:
                return found
        time.sleep(POLL_S)


def watch_evaluation(client: Client, started: Document, *, quiet: bool) -> Document:
    """Wait for the end of the evaluation and return it, showing its progress unless `quiet`. Raises
    Interrupted on SIGINT; the evaluation continues."""
    ref, name = str(started["id"]), str(started.get("name"))
    try:
        if quiet:
            return wait_for_end(client, ref, each=lambda _: None)
        if not sys.stdout.isatty():
            return wait_for_end(client, ref, each=ProgressLines(name))
        with _progress_bar() as bar:
            task = bar.add_task(name, total=started.get("total"))
            return wait_for_end(
                client,
                ref,
                each=lambda e: bar.update(
                    task, completed=e.get("completed") or 0, total=e.get("total")
                ),
            )
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"stopped watching; the evaluation {name} continues", f"headrace eval info {name}"
        ) from error


class ProgressLines:
    """Progress for a pipe: one line for each tenth of the rows and for each change of status."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: tuple[object, int] | None = None

    def __call__(self, found: Document) -> None:
        completed, total = found.get("completed") or 0, found.get("total") or 0
        now = found.get("status"), completed * TENTHS // total if total else 0
        if now != self._said:
            say(f"{self._name}: {_progress(found)}")
        self._said = now


def _progress_bar() -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    text = TextColumn("{task.description}", markup=False)
    return Progress(text, BarColumn(), MofNCompleteColumn(), Left(), console=console())


def _progress(found: Document) -> str:
    return (
        f"{found.get('status')}: {found.get('completed') or 0} of {found.get('total') or '?'} rows"
    )


def _failure(found: Document) -> Failure | None:
    if found.get("status") != "failed":
        return None
    return Failure("EVAL_FAILED", f"the evaluation failed: {found.get('error')}")


@command(evaluation, "list", example="headrace eval list")
@LIMIT
@OFFSET
@click.option("--project", help="Only evaluations of this project.")
def list_(client: Client, *, limit: int, offset: int, project: str | None) -> Output:
    """List the evaluations of this server, newest first."""
    answer = client.get("/evals", {"limit": limit, "offset": offset, "project": project})
    rows = [
        (
            name,
            *(e.get(key) for key in ("status", "model", "dataset", "reward")),
            interval_text(interval_of(e.get("metrics") or {}, "eval/reward")),
            time_ago(e.get("created_at")),
        )
        for e, name in zip(answer["evals"], distinct_names(answer["evals"]), strict=True)
    ]
    columns = ("name", "status", "model", "dataset", "reward", "95 % interval", "created")
    return Output(answer, table("Evaluations", columns, rows))


@command(evaluation, "info", example="headrace eval info my-eval")
@EVAL
def info(client: Client, ref: str) -> Output:
    """Show an evaluation: its reward and metrics."""
    answer = client.get(f"/evals/{path_segment(ref)}")
    figures = client.get(f"/evals/{path_segment(ref)}/summary")
    shown = (_describe(answer["eval"]), summary_table(figures["summary"]))
    return Output({**answer, **figures}, *shown)


def _describe(found: Document) -> Iterator[Part]:
    keys = ("id", "status", "model", "dataset", "dataset_version", "rollout", "reward", "error")
    pairs = [(key, found.get(key)) for key in (*keys, "created_at", "started_at", "completed_at")]
    yield fields(f"Evaluation {found.get('name')}", [*pairs, ("rows", _progress(found))])
    if found.get("metrics"):
        yield table("Metrics", COLUMNS, figure_rows(found["metrics"]))
        if LEFT_OUT not in found["metrics"]:
            yield OLD_FIGURES
        elif found["metrics"].get("eval/failed") and found["metrics"].get("eval/reward", 0.0) < 0:
            yield CRASHES_PAY


@command(evaluation, "logs", example="headrace eval logs my-eval")
@EVAL
@click.option("--limit", default=200, show_default=True, help="Show at most this many lines.")
def logs(client: Client, ref: str, *, limit: int) -> Output:
    """Show the log of an evaluation, oldest line first."""
    answer = client.get(f"/evals/{path_segment(ref)}/logs", {"limit": limit})
    lines = [
        f"{entry.get('timestamp')}  {entry.get('level')}  {entry.get('message')}"
        for entry in answer["logs"]
    ]
    return Output(answer, lines)


@command(evaluation, "stop", example="headrace eval stop my-eval")
@EVAL
def stop(client: Client, ref: str) -> Output:
    """Stop an evaluation."""
    answer = client.post(f"/evals/{path_segment(ref)}/stop")
    return Output(answer, f"stopping {ref}")


@command(evaluation, "delete", example="headrace eval delete my-eval --yes")
@EVAL
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(client: Client, ref: str, *, yes: bool, as_json: bool) -> Output:
    """Delete an ended evaluation and its samples permanently."""
    confirm(f"delete evaluation {ref} with all its samples", yes=yes, as_json=as_json)
    answer = client.delete(f"/evals/{path_segment(ref)}")
    return Output(answer, f"deleted {ref}")


@command(evaluation, "retry", example="headrace eval retry my-eval --watch")
@EVAL
@SECRETS_FILE
@click.option("--watch", is_flag=True, help="Wait until the evaluation ends.")
def retry(
    client: Client, ref: str, *, secrets_file: str | None, watch: bool, as_json: bool
) -> Output:
    """Repeat the attempts of an evaluation that were left out.

    Their results take the places of the missing ones. Secrets that were given for the first attempts
    alone are given again.
    """
    secrets = read_secrets(secrets_file)
    answer = client.post(
        f"/evals/{path_segment(ref)}/retry", {"secrets": secrets} if secrets else {}
    )
    started: Document = answer["eval"]
    if watch:
        ended = watch_evaluation(client, started, quiet=as_json)
        return Output({**answer, "eval": ended}, _describe(ended), failure=_failure(ended))
    said = f"repeating {answer['retryable_samples']} attempts of {started['name']}"
    return Output(answer, said)


for more in (samples, download, files, compare, run, import_results):
    evaluation.add_command(more)
