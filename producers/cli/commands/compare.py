"""`headrace train compare`: shows runs side by side, from the API's response for each of them; and
`headrace train diff`: where two runs part.

Settings are aligned by key. Curves and held-out rewards are aligned by step. Each row has one value per
run, which is None if a run has no value. Settings that are equal in all runs are left out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import click

from infra.readmodel.estimates import HIGH, LOW, interval_of
from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.display.figures import value_text
from producers.cli.display.output import (
    Document,
    Output,
    cell_text,
    print_table,
    say,
    sparkline,
)
from producers.cli.display.units import run_status
from producers.cli.exporters.sink import flatten_config

IDENTITY_KEYS = ("id", "name", "status", "phase", "algorithm", "execution_mode", "model", "dataset")
PROGRESS_KEYS = ("current_step", "total_steps", "reward", "error", "archived_at")
PINNED_KEYS = ("commit_sha", "model", "dataset")
"""The fields of a run, outside its config, in which two runs may differ."""

HELD_OUT = {
    "reward": "eval/validation/reward",
    "loss": "eval/validation/loss",
    "accuracy": "eval/validation/accuracy",
}
SUMS = {
    "sampled_tokens": "rollout/tokens",
    "trained_tokens": "train/tokens",
    "samples": "rollout/num_samples",
}
TIMES = ("generate", "grade", "wait", "learn", "publish")
CURVES = (
    "rollout/raw_reward",
    "train/loss",
    "train/kl",
    "train/entropy_loss",
    "rollout/response_lengths",
    "train/grad_norm",
    "train/clip_ratio",
    "train/lag",
)
"""The curves that are shown unless the user names metrics. JSON output has every curve."""


def compare_answers(answers: Sequence[Document]) -> Document:
    """Compare the responses to GET /runs/{run}, in the order in which the runs were named."""
    runs = [answer["run"] for answer in answers]
    curves: list[Mapping[str, Sequence[Document]]] = [a.get("metrics") or {} for a in answers]
    keys = sorted({key for curve in curves for key in curve})
    aligned = {key: _align_by_step([curve.get(key) or () for curve in curves]) for key in keys}
    return {
        "runs": [{key: run.get(key) for key in (*IDENTITY_KEYS, *PROGRESS_KEYS)} for run in runs],
        "settings": _differing([_settings(run) for run in runs]),
        "totals": _totals(runs, curves),
        "held_out": {what: aligned[key] for what, key in HELD_OUT.items() if key in aligned},
        "checkpoints": [answer.get("checkpoints") or [] for answer in answers],
        "metrics": aligned,
    }


def _settings(run: Document) -> dict[str, str]:
    own = {key: str(run[key]) for key in PINNED_KEYS if run.get(key) is not None}
    return own | dict(flatten_config(run.get("config") or {}))


def _differing(settings: Sequence[Mapping[str, str]]) -> list[Document]:
    keys = dict.fromkeys(key for each in settings for key in each)
    values = {key: [each.get(key) for each in settings] for key in keys}
    return [{"key": key, "values": found} for key, found in values.items() if len(set(found)) > 1]


def _align_by_step(curves: Sequence[Iterable[Document]]) -> list[Document]:
    """Align one curve of each run into rows {step, values}, for every step that any of them has."""
    points = [{int(p["step"]): float(p["value"]) for p in curve} for curve in curves]
    steps = sorted({step for each in points for step in each})
    return [{"step": step, "values": [each.get(step) for each in points]} for step in steps]


def _totals(
    runs: Sequence[Document], curves: Sequence[Mapping[str, Sequence[Document]]]
) -> dict[str, list[float | None]]:
    """The cost of each run: wall-clock seconds, tokens, and seconds per kind of work."""
    found = {
        "wall_s": [_wall_s(run, curve) for run, curve in zip(runs, curves, strict=True)],
        **{name: [_sum(curve.get(key)) for curve in curves] for name, key in SUMS.items()},
        **{f"{what}_s": [_sum(c.get(f"time/{what}_s")) for c in curves] for what in TIMES},
    }
    return {name: values for name, values in found.items() if any(v is not None for v in values)}


def _sum(points: Sequence[Document] | None) -> float | None:
    return math.fsum(float(point["value"]) for point in points) if points else None


def _wall_s(run: Document, curves: Mapping[str, Sequence[Document]]) -> float | None:
    """Seconds from the start of a run to its end, or to its newest point while it is running."""
    began = run.get("started_at")
    times = [str(point["at"]) for points in curves.values() for point in points if point.get("at")]
    ended = run.get("completed_at") or max(times, key=datetime.fromisoformat, default=None)
    if not began or not ended:
        return None
    return (datetime.fromisoformat(str(ended)) - datetime.fromisoformat(began)).total_seconds()


def compare_runs(client: Client, names: Sequence[str]) -> Document:
    """Fetch the runs and compare them. Raises UsageError unless there are at least two different runs,
    and Failure when the server does not know one."""
    if len(set(names)) != len(names) or len(names) < 2:
        raise click.UsageError("compare needs two or more different runs; name each of them once")
    return compare_answers([client.get(f"/runs/{path_segment(name)}") for name in names])


def print_comparison(found: Document, *, metrics: Sequence[str], rows: int) -> None:
    """Print a comparison, with at most `rows` steps of each metric, including the first and the last.
    Raises UsageError for a metric that no run has."""
    _check_metrics(metrics, found["metrics"])
    runs: list[Document] = found["runs"]
    names = [str(run["name"]) for run in runs]
    for run in runs:
        if run["archived_at"]:
            name = run["name"]
            say(
                f"note: {name} is archived and has no curves; restore it: headrace train restore {name}"
            )
    columns = ("", *names)
    statuses = ("status", *(run_status(run) for run in runs))
    print_table("Runs", columns, [statuses, ("algorithm", *(run["algorithm"] for run in runs))])
    if settings := [(s["key"], *s["values"]) for s in found["settings"]]:
        print_table("Settings that differ", columns, settings)
    print_table("Totals", columns, [(key, *values) for key, values in found["totals"].items()])
    wanted = metrics or [key for key in CURVES if key in found["metrics"]]
    _overview(wanted, names, found["metrics"])
    held_out = [HELD_OUT[what] for what in found["held_out"]]
    for key in dict.fromkeys((*wanted, *held_out)):
        print_table("", (f"{key} at step", *names), _at_steps(key, found["metrics"], rows))
    for name, checkpoints in zip(names, found["checkpoints"], strict=True):
        listed = [f"@{c['step']} ({cell_text(c.get('reward'))})" for c in checkpoints]
        say(f"checkpoints of {name}: {', '.join(listed) or 'none'}")


def _check_metrics(metrics: Sequence[str], known: Mapping[str, Any]) -> None:
    for key in metrics:
        if key not in known:
            raise click.UsageError(
                f"no run has the metric {key!r}; choose one of: {', '.join(known) or 'none'}"
            )


def _overview(wanted: Sequence[str], names: Sequence[str], metrics: Mapping[str, Any]) -> None:
    """Print each curve of each run in one line."""
    rows = []
    for key in wanted:
        for i, name in enumerate(names):
            values = [p["values"][i] for p in metrics[key] if p["values"][i] is not None]
            if values:
                rows.append((key, name, values[0], values[-1], sparkline(values)))
    print_table("Curves", ("metric", "run", "first", "last", "curve"), rows)


def _at_steps(key: str, metrics: Mapping[str, Any], most: int) -> list[tuple[object, ...]]:
    """The values of a metric at steps, each with its 95 % interval if it has one."""
    ends = {
        key + end: {p["step"]: p["values"] for p in metrics.get(key + end, ())}
        for end in (LOW, HIGH)
    }
    rows: list[tuple[object, ...]] = []
    for point in _thin(metrics[key], most):
        step, values = point["step"], point["values"]
        known = {name: at[step] for name, at in ends.items() if step in at}
        intervals = [
            interval_of({name: at[i] for name, at in known.items()}, key)
            for i in range(len(values))
        ]
        rows.append((step, *map(value_text, values, intervals)))
    return rows


def _thin(points: Sequence[Document], most: int) -> list[Document]:
    """At most `most` evenly spaced points, including the first and the last."""
    if len(points) <= most:
        return list(points)
    last = len(points) - 1
    return [points[round(i * last / (most - 1))] for i in range(most)]


@command(None, "diff", example="headrace train diff first first-fork-1")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
def diff(client: Client, first: str, second: str) -> Output:
    """Show where two runs part, and in which event.

    Also shown are their last common step, the keys that differ, their final metrics, and the held-out
    rows that changed.
    """
    answer = client.get(f"/runs/{path_segment(first)}/diff/{path_segment(second)}")
    return Output(answer, partial(_print_diff, answer["diff"]))


def _print_diff(found: Document) -> None:
    names = [str(run["name"]) for run in found["runs"]]
    ancestor = found["ancestor"]
    say(
        f"both share the history of {ancestor['name']} up to step {ancestor['step']}"
        if ancestor
        else f"{names[0]} and {names[1]} share no history: neither is a fork of the other's runs"
    )
    parted = found["first_divergence"]
    if parted is None:
        say("no step that both have settled has other weights")
    else:
        say(f"first difference: step {parted['step']}, {parted['what']}")
        rows = [
            (name, *(event or {}).values())
            for name, event in zip(names, parted["events"], strict=True)
        ]
        if all(parted["events"]):
            print_table("First event", ("run", "id", "cursor", "type", "stream", "version"), rows)
    settings = [(one["key"], *one["values"]) for one in found["settings"]]
    if settings:
        print_table("Settings that differ", ("key", *names), settings)
    metrics = [(one["key"], *one["final"], one["differs_from_step"]) for one in found["metrics"]]
    print_table("Metrics", ("metric", *names, "differs from step"), metrics)
    held_out = found["held_out"]
    if held_out is None:
        return
    if flipped := [(row["row"], row["change"], *row["reward"]) for row in held_out["flipped"]]:
        title = f"Held-out rows that flipped at step {held_out['step']}"
        print_table(title, ("row", "change", *names), flipped)
