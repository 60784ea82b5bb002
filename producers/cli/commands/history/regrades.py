"""`headrace train regrade` and `headrace train regrades`: grade the recorded samples of a run again."""

import re
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import RUN
from producers.cli.display.output import Document, Output, Part, fields, one_line, table, time_ago
from producers.cli.display.units import count_of
from producers.cli.display.waiting import told_while_waiting
from producers.cli.errors import Failure, Interrupted
from producers.cli.repository import commit_working_tree, repository_around

POLL_S = 0.3
MOST_STEPS = 40
"""The most steps that the report shows as a table; --json has all."""

STEPS = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
ENDED = ("finished", "failed")


@command(None, "regrade", example="headrace train regrade my-run --grader HEAD --steps 1..20")
@RUN
@click.option("--grader", metavar="COMMIT|PATH", help="A commit, a branch, or a working tree.")
@click.option(
    "--rubric", type=click.Path(dir_okay=False, path_type=Path), help="A TOML of rubrics."
)
@click.option("--reward", "rewards", multiple=True, metavar="NAME=WEIGHT", help="Weigh a part so.")
@click.option("--steps", metavar="A..B", help="Only the samples of these steps.")
@click.option(
    "--sample-share", "share", type=float, help="Only this share of the groups, like 0.1."
)
@click.option("--threshold", type=float, help="The reward from which a sample passes; default: 1.")
@click.option("--gradients", is_flag=True, help="Compare the policy gradients of each step too.")
@click.option("--detach", is_flag=True, help="Do not wait for the report.")
def regrade(
    client: Client,
    run: str,
    *,
    grader: str | None,
    rubric: Path | None,
    rewards: tuple[str, ...],
    steps: str | None,
    share: float | None,
    threshold: float | None,
    gradients: bool,
    detach: bool,
    as_json: bool,
) -> Output:
    """Grade the recorded samples of a run again.

    The report compares the rewards, and nothing is sampled. RUN is a run, or `regrade:ID` for the grades
    of another regrade. --reward alone weighs the recorded parts of the rewards again and calls no code.
    PATH is a directory of a working tree with its uncommitted changes, which must be on the machine of
    the server. The file of --rubric has tables [[rubrics]] with the keys of [[advanced.rubrics]].
    """
    body: Document = {}
    if grader is not None:
        body |= _grader(grader)
    if rubric is not None:
        body["rubrics"] = _read_rubrics(rubric)
    if rewards:
        body["weights"] = dict(_weight(text) for text in rewards)
    if steps is not None:
        body["steps"] = _range(steps)
    numbers = {"share": share, "threshold": threshold}
    body |= {name: value for name, value in numbers.items() if value is not None}
    if gradients:
        body["gradients"] = True
    requested: Document = client.post(f"/runs/{path_segment(run)}/regrades", body)["regrade"]
    if detach:
        return Output({"regrade": requested}, f"regrade {requested['id']} of {run} was requested")
    with told_while_waiting(lambda: f"grading the samples of {run} again", quiet=as_json):
        found = _wait(client, str(requested["id"]), run)
    failure = None
    if found["status"] == "failed":
        failure = Failure("REGRADE_FAILED", f"regrade {found['id']} failed: {found['error']}")
    return Output({"regrade": found}, _describe(run, found), failure=failure)


@command(None, "regrades", example="headrace train regrades my-run")
@RUN
@click.option("--id", "identity", metavar="ID", help="Show the report of this regrade.")
def regrades(client: Client, run: str, *, identity: str | None) -> Output:
    """List the regrades of a run.

    The newest comes first. --id shows the report of one.
    """
    if identity is not None:
        found: Document = client.get(f"/regrades/{path_segment(identity)}")["regrade"]
        return Output({"regrade": found}, _describe(run, found))
    answer = client.get(f"/runs/{path_segment(run)}/regrades")
    rows = [
        (
            one["id"],
            one["status"],
            _what(one),
            one["requester"],
            _number((one["report"] or {}).get("reward_before")),
            _number((one["report"] or {}).get("reward_after")),
            time_ago(one["created_at"]),
        )
        for one in answer["regrades"]
    ]
    columns = ("id", "status", "graded by", "requested by", "before", "after", "when")
    empty = f"{run} has no regrades; `headrace train regrade {run} --help` shows how to make one"
    return Output(answer, table(f"Regrades of {run}", columns, rows, empty=empty))


def _grader(text: str) -> Document:
    """The grader as the API takes it: a commit, a branch, or a commit made of a working tree."""
    path = Path(text).expanduser()
    if not path.is_dir():
        if "/" in text and path.is_absolute():
            raise Failure(
                "NOT_FOUND", f"{text} is not a directory; name a working tree or a commit"
            )
        return {"grader": text}
    repository = repository_around(path.resolve() / "rollouts")
    return {"tree": commit_working_tree(repository)}


def _read_rubrics(path: Path) -> list[Document]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Failure("VALIDATION", f"cannot read rubrics from {path}: {error}") from error
    found = content.get("rubrics")
    if not isinstance(found, list) or not found or set(content) != {"rubrics"}:
        raise Failure(
            "VALIDATION",
            f"{path} must have tables [[rubrics]] and nothing else; see advanced.rubrics in "
            "docs/config.md for their keys",
        )
    return found


def _weight(text: str) -> tuple[str, float]:
    name, mark, number = text.partition("=")
    try:
        if not mark or not name:
            raise ValueError("no name or no weight")
        return name, float(number)
    except ValueError as error:
        raise Failure(
            "VALIDATION", f"--reward must be NAME=WEIGHT, like length=0.5, got {text!r}"
        ) from error


def _range(text: str) -> list[int]:
    found = STEPS.fullmatch(text)
    if found is None:
        raise Failure("VALIDATION", f"--steps must be A..B, like 1..20, got {text!r}")
    return [int(found[1]), int(found[2])]


def _wait(client: Client, identity: str, run: str) -> Document:
    try:
        while True:
            found: Document = client.get(f"/regrades/{path_segment(identity)}")["regrade"]
            gradients = found["gradients"]
            is_comparing = gradients is not None and gradients["status"] == "running"
            if found["status"] in ENDED and not is_comparing:
                return found
            time.sleep(POLL_S)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"stopped waiting; regrade {identity} continues",
            f"headrace train regrades {run} --id {identity}",
        ) from error


def _what(found: Document) -> str:
    """A short text about the new grading."""
    parts = [f"{name} x {weight:g}" for name, weight in found["weights"].items()]
    if found["rubrics"]:
        parts.insert(0, "rubrics " + ", ".join(found["rubrics"]))
    if found["source"] in ("commit", "working tree"):
        parts.insert(0, f"{found['source']} {str(found['commit'])[:12]}")
    return "; ".join(parts)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _describe(run: str, found: Document) -> Iterator[Part]:
    report: Document | None = found["report"]
    if report is None:
        yield None if found["error"] else f"regrade {found['id']} of {run} is {found['status']}"
        return
    speed = report["samples"] / found["seconds"] if found["seconds"] else None
    rate = f", {speed:,.0f} samples/s" if speed else ""
    yield fields(
        f"Regrade {found['id']} of {run}",
        [
            ("graded by", _what(found)),
            ("samples", f"{report['samples']:,} in {count_of(report['groups'], 'group')}{rate}"),
            ("mean reward before", _number(report["reward_before"])),
            ("mean reward after", _number(report["reward_after"])),
            ("rewards changed", _share(report["changed_share"])),
            ("flips around the group's mean", _share(report["mean_flip_share"])),
            (f"flips at {found['threshold']:g}", _share(report["threshold_flip_share"])),
            ("Kendall's tau in groups", _number(report["kendall_tau"])),
            ("groups that lose all differences", report["groups_flattened"]),
            ("groups that gain a difference", report["groups_spread"]),
            ("advantages that change sign", _share(report["advantage_sign_share"])),
            ("without a new reward", _ungraded(found, report)),
        ],
    )
    yield _step_table(found)
    yield _gradient_table(found)
    if found["worst"]:
        rows = [
            (one["sample"], one["step"], _number(one["before"]), _number(one["after"]))
            for one in found["worst"][:10]
        ]
        yield table("Largest disagreements", ("sample", "step", "before", "after"), rows)
    if found["ungraded"]:
        rows = [
            (one["sample"], _number(one["before"]), one["category"], one_line(one["message"]))
            for one in found["ungraded"][:5]
        ]
        yield table("Without a new reward", ("sample", "before", "category", "message"), rows)


def _ungraded(found: Document, report: Document) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["failures"].items())
    return f"{report['samples'] - report['graded_after']}" + (f" ({kinds})" if kinds else "")


def _step_table(found: Document) -> Part:
    columns = ("step", "samples", "before", "after", "flips", "tau", "advantages turned")
    rows = [
        (
            step,
            of["samples"],
            _number(of["reward_before"]),
            _number(of["reward_after"]),
            _share(of["mean_flip_share"]),
            _number(of["kendall_tau"]),
            _share(of["advantage_sign_share"]),
        )
        for step, of in found["by_step"].items()
    ]
    if len(rows) > MOST_STEPS:
        return f"{len(rows)} steps; --json has the figures of each"
    return table("By step", columns, rows, empty="")


def _gradient_table(found: Document) -> Part:
    gradients = found["gradients"]
    if gradients is None:
        return None
    rows = [
        (
            one["step"],
            _number(one["cosine"]),
            f"{one['norm_before']:.4g}",
            f"{one['norm_after']:.4g}",
            f"{one['turned']} of {one['advantages']}",
            one["missing"] or None,
        )
        for one in gradients["steps"]
    ]
    columns = (
        "step",
        "cosine",
        "norm before",
        "norm after",
        "advantages turned",
        "groups left out",
    )
    note = (
        f"the gradients could not be compared: {gradients['error']}" if gradients["error"] else None
    )
    return [table("Policy gradients", columns, rows, empty=""), note]
