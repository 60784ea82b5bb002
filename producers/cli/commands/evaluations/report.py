"""`headrace eval run`: an evaluation on this machine, and its report as JSON and as Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from producers.cli.checkpoint_files import checkpoint_directory
from producers.cli.command import command
from producers.cli.config_files import read_config
from producers.cli.display.figures import COLUMNS, figure_rows
from producers.cli.display.output import Document, Output, cell_text, one_line, say, table
from producers.cli.errors import Failure
from producers.cli.rollouts.tryout_process import run_tryout
from producers.cli.rollouts.workspace_files import workspace_around

REPORT, PAGE, SAMPLES = "report.json", "report.md", "samples.jsonl"
MOST_LISTED = 500
"""How many rows the page lists. The JSON has all of them."""


@command(None, "run", example="headrace eval run configs/eval/greedy.toml --limit 20")
@click.argument("config", metavar="CONFIG", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(1), help="Evaluate only the first rows, this many.")
@click.option(
    "--dataset",
    type=click.Path(path_type=Path),
    help="File with the rows. Default: data/NAME.jsonl of the config's dataset.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the report. Default: the config's name with -report.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing report.")
def run(
    config: Path,
    *,
    limit: int | None,
    dataset: Path | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> Output:
    """Evaluate on this machine, without a server.

    Workflow and grader run confined, as in an evaluation of the server. The report is written as
    report.json, report.md and samples.jsonl. Keys of model providers are environment variables
    here, with the names of their secrets.
    """
    document = read_config(config)
    directory = output or Path(f"{config.stem}-report")
    _refuse_existing(directory, force=force)
    request = _request(config, document, limit=limit, dataset=dataset)
    directory.mkdir(parents=True, exist_ok=True)
    with checkpoint_directory(_model(document)) as checkpoint:
        report = _evaluate({**request, "checkpoint": checkpoint}, directory, quiet=as_json)
    if report is None:
        raise Failure("FAILED", "the evaluation ended without a report; run it again")
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (directory / REPORT).write_text(text + "\n", encoding="utf-8")
    (directory / PAGE).write_text(markdown(report), encoding="utf-8")
    return Output(
        {"report": report, "directory": str(directory)},
        table("Metrics", COLUMNS, figure_rows(report["metrics"])),
        f"saved the report in {directory}",
    )


def _evaluate(request: Mapping[str, object], directory: Path, *, quiet: bool) -> Document | None:
    """Save the samples as they come, and return the report, if there is one."""
    report: Document | None = None
    with (directory / SAMPLES).open("w", encoding="utf-8") as samples:
        for answer in run_tryout(request):
            if "sample" in answer:
                samples.write(json.dumps(answer["sample"], ensure_ascii=False) + "\n")
                if not quiet:
                    say(_line(answer["sample"]))
            elif "report" in answer:
                report = answer["report"]
            elif not quiet:
                say(str(answer.get("note")))
    return report


def _model(document: Document) -> str:
    experiment = document.get("experiment")
    return str(experiment.get("model_path")) if isinstance(experiment, dict) else ""


def _refuse_existing(directory: Path, *, force: bool) -> None:
    """Raise Failure when the directory has a report already."""
    if (directory / REPORT).exists() and not force:
        raise Failure(
            "CONFLICT",
            f"{directory} has a report already; name another directory with --output, or overwrite it "
            "with --force",
        )


def _request(
    config: Path, document: Document, *, limit: int | None, dataset: Path | None
) -> dict[str, object]:
    evaluation = dict(document.get("evaluation") or {})
    if limit is not None:
        evaluation["limit"] = limit
    experiment = document.get("experiment")
    rollout = experiment.get("rollout") if isinstance(experiment, dict) else None
    return {
        "mode": "evaluate",
        "workspace": str(workspace_around(config.resolve().parent)),
        "rollout": str(rollout or ""),
        "config": {**document, "evaluation": evaluation},
        "config_path": str(config),
        "dataset": str(dataset.resolve()) if dataset else None,
    }


def _line(sample: Document) -> str:
    """One line about a sample."""
    error = sample.get("error")
    result = f"failed: {one_line(str(error))}" if error else f"reward {cell_text(sample['reward'])}"
    return f"row {sample['row']}, attempt {sample['sample']}: {result}"


def markdown(report: Document) -> str:
    """The report as a page. Text of user code is escaped and cut."""
    metrics: Document = report["metrics"]
    rows: list[Document] = report["rows"]
    about = ("model", "dataset", "rollout", "attempts", "pass_threshold", "seed")
    lines = [
        f"# Evaluation of {_cell(report['model'])}",
        "",
        *_table(("", ""), [(key, report[key]) for key in about]),
        "",
        "## Metrics",
        "",
        *_table(COLUMNS, figure_rows(metrics)),
        "",
        "## Rows",
        "",
    ]
    columns = ("row", "passed", "attempts", "reward", "rewards", "error")
    lines += _table(columns, [[row[key] for key in columns] for row in rows[:MOST_LISTED]])
    if len(rows) > MOST_LISTED:
        lines += ["", f"{len(rows) - MOST_LISTED} more rows are in {REPORT}."]
    return "\n".join([*lines, ""])


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(map(_cell, row))} |" for row in rows]


def _cell(value: object) -> str:
    """A value as the text of a cell, in which nothing is markup."""
    text = one_line(cell_text(value), limit=200)
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#!" else c for c in text)
