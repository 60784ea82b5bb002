"""`headrace eval samples`, `download` and `compare`: the results of evaluations by row and attempt."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from infra.readmodel.estimates import IntervalFigure, figures_in_order
from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import FEW, OFFSET
from producers.cli.display.figures import difference_rows, value_text
from producers.cli.display.output import (
    Document,
    Output,
    Part,
    one_line,
    table,
)
from producers.cli.display.units import failure_text
from producers.cli.errors import Failure
from producers.cli.rollouts.sample_view import show_sample

ENDED = ("finished", "failed", "stopped")
"""The states of an evaluation in which nothing more comes."""
EVAL = click.argument("ref", metavar="EVAL")
FILES = ("metrics.json", "summary.jsonl", "samples.jsonl")
"""The files of a downloaded evaluation: its figures, a line per row, and a line per attempt."""


@command(None, "samples", example="headrace eval samples my-eval --failed")
@EVAL
@click.option("--row", type=click.IntRange(0), help="Only the attempts at this row (from 0).")
@click.option("--sample", metavar="ID", help="Only this attempt, turn by turn, with its output.")
@click.option("--failed", is_flag=True, help="Only attempts that have no reward.")
@click.option("--not-passed", is_flag=True, help="Only attempts that do not pass.")
@FEW
@OFFSET
def samples(
    client: Client,
    ref: str,
    *,
    row: int | None,
    sample: str | None,
    failed: bool,
    not_passed: bool,
    limit: int,
    offset: int,
    as_json: bool,
) -> Output | None:
    """Show the attempts of an evaluation: prompts, answers and rewards.

    With --row, each attempt at that row is shown with its whole conversation.
    """
    chosen = {"failed": failed, "not_passed": not_passed}
    query: dict[str, str | int | None] = {name: "true" for name, is_on in chosen.items() if is_on}
    query |= {"row": row, "limit": limit, "offset": offset}
    path = f"/evals/{path_segment(ref)}/samples"
    if sample is not None:
        one = f"{path}/{path_segment(sample)}"
        show_sample(client, one, files=None, as_json=as_json)
        return None
    answer = client.get(path, query)
    if row is not None:
        return Output(answer, map(_attempt_lines, answer["samples"]))
    shown = [
        (
            s.get("row"),
            s.get("attempt"),
            _short(s.get("text")),
            s.get("label"),
            s.get("reward"),
            failure_text(s),
        )
        for s in answer["samples"]
    ]
    columns = ("row", "attempt", "answer", "truth", "reward", "failure")
    return Output(answer, table(f"Samples of {ref}", columns, shown))


def _attempt_lines(sample: Document) -> Iterator[str]:
    """One attempt with its conversation."""
    reward = "no reward" if sample.get("reward") is None else f"reward {sample['reward']:g}"
    yield f"row {sample.get('row')}, attempt {sample.get('attempt')}: {reward}"
    for message in sample.get("messages") or sample.get("prompt") or ():
        yield f"  {message.get('role')}: {message.get('content')}"
        for call in message.get("tool_calls") or ():
            yield f"    calls {call.get('name')}({call.get('arguments')})"
    if sample.get("label") is not None:
        yield f"  truth: {sample['label']}"
    if failure := failure_text(sample):
        yield f"  failure: {failure}"


def _short(text: object) -> str:
    return one_line(str(text or ""), limit=50)


@command(None, "download", example="headrace eval download my-eval -o results")
@EVAL
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the files. Default: EVAL.",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def download(
    client: Client, ref: str, file: Path | None, *, output: Path | None, force: bool
) -> Output:
    """Save the figures, rows and attempts of an evaluation.

    They are saved as metrics.json, summary.jsonl and samples.jsonl. With FILE, only its attempts are
    saved, there.
    """
    if file is not None and output is not None:
        raise click.UsageError("give FILE or --output, not both")
    path = f"/evals/{path_segment(ref)}"
    found: Document = client.get(path)["eval"]
    folder = output or Path(str(found["name"]))
    places = [file] if file is not None else [folder / name for name in FILES]
    _refuse_existing(places, force=force)
    if file is not None:
        number = _save_lines(client, f"{path}/samples", "samples", file)
        report: Document = {"file": str(file), "num_samples": number}
    else:
        folder.mkdir(parents=True, exist_ok=True)
        metrics, summary, all_samples = places
        text = json.dumps({"eval": found, "metrics": found.get("metrics") or {}}, indent=2)
        metrics.write_text(text + "\n", encoding="utf-8")
        num_rows = _save_lines(client, f"{path}/rows", "rows", summary)
        number = _save_lines(client, f"{path}/samples", "samples", all_samples)
        report = {"directory": str(folder), "num_rows": num_rows, "num_samples": number}
    status = str(found.get("status"))
    saved = f"saved {number} samples in {file or folder}"
    if "status" in found and status not in ENDED:
        saved += (
            f", those so far: {found['name']} is {status}; download it again with --force when it has "
            f"ended, which `headrace eval info {found['name']}` shows"
        )
    return Output({**report, "status": status, "files": [str(place) for place in places]}, saved)


def _refuse_existing(places: list[Path], *, force: bool) -> None:
    for place in places:
        if place.exists() and not force:
            raise Failure(
                "CONFLICT",
                f"the file {place} already exists; choose another place, or overwrite it with --force",
            )


def _save_lines(client: Client, path: str, items: str, place: Path) -> int:
    """Save a list of the API as JSON Lines, and return how many lines there are."""
    number = 0
    with place.open("w", encoding="utf-8") as out:
        for item in client.pages(path, items):
            out.write(json.dumps(item, ensure_ascii=False) + "\n")
            number += 1
    return number


@command(None, "compare", example="headrace eval compare base-eval tuned-eval")
@click.argument("first", metavar="EVAL")
@click.argument("second", metavar="EVAL")
@click.option("--all", "show_all", is_flag=True, help="Show rows that did not change, too.")
@FEW
def compare(client: Client, first: str, second: str, *, show_all: bool, limit: int) -> Output:
    """Compare the figures and the rows of two evaluations.

    They must be of one dataset. A row is gained if a larger share of its attempts passes in the second
    evaluation.
    """
    found = client.get(f"/evals/{path_segment(first)}/compare/{path_segment(second)}")
    changed = [row for row in found["rows"] if show_all or row["change"] != "same"]
    return Output({**found, "rows": changed}, _comparison(found, changed, limit))


def _comparison(found: Document, changed: Sequence[Document], limit: int) -> Iterator[Part]:
    names = [str(each["name"]) for each in found["evals"]]
    models = ("model", *(each["model"] for each in found["evals"]))
    values = {metric["key"]: metric["values"] for metric in found["metrics"]}
    yield table("Metrics", ("", *names), [models, *_metric_rows(values)])
    for caveat in found.get("caveats") or ():
        yield f"note: {caveat}"
    if found["differences"]:
        columns = ("", "difference", "standard error", "95 % interval", "rows")
        yield table("Paired differences", columns, difference_rows(found["differences"]))
    counts = found["counts"]
    yield ", ".join(f"{counts[change]} {change}" for change in counts)
    rows = [
        (row["row"], row["change"], *(_result(row, i) for i in range(2))) for row in changed[:limit]
    ]
    if rows:
        yield table("Rows", ("row", "change", *names), rows)
    if len(changed) > limit:
        yield f"{len(changed) - limit} more rows; show them with --limit"


def _metric_rows(values: Mapping[str, list[float | None]]) -> list[tuple[object, ...]]:
    """The figures of both evaluations, each with its interval."""
    sides = [
        {key: value for key, of in values.items() if (value := of[i]) is not None} for i in range(2)
    ]
    by_key = [{one.key: one for one in figures_in_order(side)} for side in sides]
    keys = sorted({key for side in by_key for key in side})
    return [(key, *(_figure(side.get(key)) for side in by_key)) for key in keys]


def _figure(figure: IntervalFigure | None) -> str | None:
    return value_text(figure.value, figure.interval) if figure else None


def _result(row: Document, which: int) -> str | None:
    """The result of a row in one of the evaluations."""
    passed, attempts, reward = (row[key][which] for key in ("passed", "attempts", "reward"))
    if passed is None:
        return None
    return f"{passed} of {attempts}" + ("" if reward is None else f", reward {reward:.4g}")
