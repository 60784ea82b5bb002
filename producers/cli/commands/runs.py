"""The commands of `headrace train` that show, watch and control runs. RUN is a run's name or id."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import FEW, LIMIT, OFFSET, RUN
from producers.cli.display.conversation import parts_text
from producers.cli.display.costs import cost_facts, parse_limits, short_cost
from producers.cli.display.output import (
    Document,
    Output,
    Part,
    fields,
    one_line,
    sparkline,
    table,
    time_ago,
)
from producers.cli.display.units import (
    checkpoint_table,
    count_of,
    distinct_names,
    failure_text,
    run_status,
    run_step,
    teaching_facts,
)
from schemas.text import model_name

TRACKERS = ("tensorboard", "wandb", "mlflow")


@command(None, "list", example="headrace train list --status running")
@LIMIT
@OFFSET
@click.option("--status", help="Only runs with this status.")
@click.option("--search", help="Only runs whose name contains this text.")
@click.option("--tag", help="Only runs with this tag.")
@click.option("--project", help="Only runs of this project.")
@click.option("--archived", is_flag=True, help="Only archived runs.")
@click.option("--cost", is_flag=True, help="Show what each run cost.")
def list_(
    client: Client,
    *,
    limit: int,
    offset: int,
    status: str | None,
    search: str | None,
    tag: str | None,
    project: str | None,
    archived: bool,
    cost: bool,
) -> Output:
    """List the runs of this server, newest first.

    Archived runs are listed only with --archived.
    """
    parameters = {
        "limit": limit,
        "offset": offset,
        "status": status,
        "search": search,
        "tag": tag,
        "project": project,
        "archived": "true" if archived else None,
        "cost": "true" if cost else None,
    }
    answer = client.get("/runs", parameters)
    rows = [
        (
            name,
            run_status(r),
            *(() if cost else _what_it_trains(r)),
            run_step(r),
            r.get("reward"),
            time_ago(r.get("created_at")),
            *(short_cost(r.get("cost")) if cost else (" ".join(r.get("tags") or ()) or None,)),
        )
        for r, name in zip(answer["runs"], distinct_names(answer["runs"]), strict=True)
    ]
    columns = (
        "name",
        "status",
        *(() if cost else ("algorithm", "model", "dataset")),
        "step",
        "reward",
        "created",
        *(("cost", "hours", "wasted") if cost else ("tags",)),
    )
    return Output(answer, table(f"Runs ({answer.get('total_count')})", columns, rows))


def _what_it_trains(run: Document) -> tuple[object, ...]:
    """Algorithm, model and dataset. The list with costs leaves them out, so that a line fits."""
    model = model_name(run.get("model") or "") or None
    return run.get("algorithm"), model, run.get("dataset")


@command(None, "info", example="headrace train info my-run")
@RUN
def info(client: Client, run: str) -> Output:
    """Show a run: its progress, curves and checkpoints."""
    answer = client.get(f"/runs/{path_segment(run)}")
    found: Document = answer["run"]
    tags = " ".join(found.get("tags") or ()) or None
    shown = found | {
        "status": run_status(found),
        "current_step": run_step(found),
        "tags": tags,
        "workspace": found.get("workspace_name") or found.get("workspace"),
    }
    left_out = ("config", "name", "workspace_name")
    pairs = [(key, value) for key, value in shown.items() if key not in left_out]
    pairs += teaching_facts(found.get("config") or {})
    waits = [
        ("now" if wait.get("what") == "effect" else "waits for", wait["message"])
        for wait in answer.get("waiting_for") or ()
    ]
    pairs += cost_facts(answer["cost"]) if answer.get("cost") else []
    curves = []
    for key, points in sorted(answer["metrics"].items()):
        values = [float(point["value"]) for point in points]
        if values:
            curves.append((key, values[0], values[-1], sparkline(values)))
    return Output(
        answer,
        fields(f"Run {found.get('name')}", [*pairs, *waits]),
        table("Metrics", ("key", "first", "last", "curve"), curves),
        checkpoint_table("Checkpoints", answer["checkpoints"]),
    )


@command(None, "watch", example="headrace train watch my-run")
@RUN
def watch(client: Client, run: str, *, as_json: bool) -> None:
    """Watch a run until it ends.

    Ctrl-C stops watching; the run continues. --json prints the final state only.
    """
    from producers.cli.watch import watch_run

    found: Document = client.get(f"/runs/{path_segment(run)}")["run"]
    watch_run(client, str(found["id"]), str(found["name"]), as_json=as_json)


@command(None, "logs", example="headrace train logs my-run --limit 50")
@RUN
@click.option("--limit", default=200, show_default=True, help="Show at most this many lines.")
def logs(client: Client, run: str, *, limit: int) -> Output:
    """Show the log of a run, oldest line first."""
    answer = client.get(f"/runs/{path_segment(run)}/logs", {"limit": limit})
    return Output(answer, map(_log_line, answer["logs"]))


def _log_line(entry: Document) -> str:
    step = "" if entry.get("step") is None else f" step {entry['step']}"
    return f"{entry.get('timestamp')}  {entry.get('level')}{step}  {entry.get('message')}"


@command(None, "approve", example="headrace train approve my-run")
@RUN
def approve(client: Client, run: str) -> Output:
    """Start a run that waits for approval.

    A trigger with require_approval makes such runs.
    """
    answer = client.post(f"/runs/{path_segment(run)}/approve")
    return Output(answer, f"{run} is approved and starts")


@command(None, "stop", example="headrace train stop my-run")
@RUN
def stop(client: Client, run: str) -> Output:
    """Stop a run and save a checkpoint of its last step.

    A step that the learner takes is finished. Samples of later steps are dropped.
    """
    answer = client.post(f"/runs/{path_segment(run)}/stop")
    waits = [f"now it waits: {wait['message']}" for wait in answer.get("waiting_for") or ()]
    said = f"{run} will stop when its learner is idle, with a checkpoint of its last step, if any"
    return Output(answer, said, waits)


@command(None, "pause", example="headrace train pause my-run")
@RUN
def pause(client: Client, run: str) -> Output:
    """Pause a run after its current step.

    Its workers are then free for other runs.
    """
    said = f"{run} will pause after its current step; continue it with: headrace train resume {run}"
    return Output(client.post(f"/runs/{path_segment(run)}/pause"), said)


@command(None, "resume", example="headrace train resume my-run --raise max_cost=20")
@RUN
@click.option(
    "--raise", "raised", multiple=True, metavar="LIMIT=NUMBER", help="Raise a limit of its budget."
)
def resume(client: Client, run: str, *, raised: tuple[str, ...]) -> Output:
    """Continue a paused run.

    Its final weights are identical to those of a run that was never paused.
    A run whose budget is exhausted needs --raise with a larger limit.
    """
    body = {"raise": parse_limits(raised)} if raised else None
    return Output(client.post(f"/runs/{path_segment(run)}/resume", body), f"{run} continues")


@command(None, "samples", example="headrace train samples my-run --step 3")
@RUN
@click.option("--step", type=click.IntRange(0), help="Only samples of this step.")
@FEW
@OFFSET
@click.option(
    "--search", metavar="TEXT", help="Only samples with this text, the newest first, at most 20."
)
@click.option("--place", help="With --search: go on from where the search before ended.")
@click.option("--sample", metavar="ID", help="Show this sample, turn by turn.")
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --sample: download its files to this directory.",
)
def samples(
    client: Client,
    run: str,
    *,
    step: int | None,
    limit: int,
    offset: int,
    search: str | None,
    place: str | None,
    sample: str | None,
    files: Path | None,
    as_json: bool,
) -> Output | None:
    """Show samples: prompts, answers and rewards.

    With --sample it shows one of them: turns, tool calls, reward, traceback, prints and files. Pass a
    sample's id to `headrace train trace` to follow it. With --search it looks for a text in all steps,
    some groups at a time.
    """
    if files is not None and sample is None:
        raise click.UsageError("--files needs --sample ID")
    if search is None and place is not None:
        raise click.UsageError("--place needs --search TEXT")
    if search is not None and (step is not None or offset or sample is not None):
        raise click.UsageError(
            "--search looks in all steps; leave --step, --offset and --sample out"
        )
    if search is not None:
        from producers.cli.rollouts.sample_view import show_search

        path = f"/runs/{path_segment(run)}/search"
        show_search(client, path, search, place=place, limit=limit, as_json=as_json)
        return None
    if sample is not None:
        from producers.cli.rollouts.sample_view import show_sample

        path = f"/runs/{path_segment(run)}/samples/{path_segment(sample)}"
        show_sample(client, path, files=files, as_json=as_json)
        return None
    parameters = {"step": step, "limit": limit, "offset": offset}
    answer = client.get(f"/runs/{path_segment(run)}/samples", parameters)
    judged = [
        (
            s.get("id"),
            j.get("rubric"),
            j.get("score"),
            j.get("model"),
            one_line(str(j.get("explanation") or j.get("problem")), limit=80),
        )
        for s in answer["samples"]
        for j in s.get("judgements", ())
    ]
    credited = [
        (s.get("id"), t.get("turn"), t.get("agent"), t.get("reward"))
        for s in answer["samples"]
        for t in (*s.get("rewarded_turns", ()), *_own_rewards(s))
    ]
    credit = table("Turns and agents", ("sample", "turn", "agent", "reward"), credited)
    judgements = table("Judgements", ("sample", "rubric", "score", "judge", "explanation"), judged)
    empty = None if answer["samples"] or as_json else _no_samples(client, run, step)
    shown = _samples_table(run, answer["samples"], empty=empty)
    return Output(answer, shown, credit if credited else None, judgements if judged else None)


def _samples_table(run: str, samples: Sequence[Document], *, empty: str | None) -> Part:
    """Samples, a line each. The parts of rewards are a column if a sample has some."""
    parts = [parts_text(s) for s in samples]
    rows = [
        (
            s.get("id"),
            one_line(_prompt(s), limit=40),
            one_line(str(s.get("text")), limit=40),
            s.get("label"),
            s.get("reward"),
            *([of_reward or None] if any(parts) else ()),
            failure_text(s),
        )
        for s, of_reward in zip(samples, parts, strict=True)
    ]
    more = ("parts",) if any(parts) else ()
    columns = ("id", "prompt", "answer", "truth", "reward", *more, "failure")
    return table(f"Samples of {run}", columns, rows, empty=empty)


def _own_rewards(sample: Document) -> list[Document]:
    """The own rewards of the agents of a sample, which belong to no turn."""
    own: Document = sample.get("agent_rewards") or {}
    return [{"agent": agent, "reward": reward} for agent, reward in own.items()]


def _no_samples(client: Client, run: str, step: int | None) -> str | None:
    """The text for no samples on the page that was asked for, if there is something to say."""
    from schemas.algorithms import OFFLINE

    found = client.get(f"/runs/{path_segment(run)}")["run"]
    if (algorithm := found.get("algorithm")) in OFFLINE:
        return f"{run} has no samples, because {algorithm} learns the answers of its dataset"
    if found.get("execution_mode") == "offline":
        return f"{run} has no samples of its own: it learns from those that another run recorded"
    if step is None:
        return None
    taken = found.get("current_step") or 0
    steps = f"steps 1 to {taken}" if taken else "no step yet"
    return f"no samples of step {step} here; {run} has taken {steps}"


def _prompt(sample: Document) -> str:
    prompt = sample.get("prompt")
    if isinstance(prompt, list):
        return " | ".join(str(m.get("content")) for m in prompt if isinstance(m, dict))
    return str(prompt)


@command(None, "compare", example="headrace train compare grpo-a grpo-b --metric train/kl")
@click.argument("runs", metavar="RUN RUN...", nargs=-1)
@click.option("--metric", "metrics", multiple=True, help="Show this curve. Can be repeated.")
@click.option(
    "--rows",
    default=20,
    show_default=True,
    type=click.IntRange(2),
    help="Show at most this many steps of a curve.",
)
def compare(
    client: Client, runs: tuple[str, ...], *, metrics: tuple[str, ...], rows: int
) -> Output:
    """Compare runs: settings, cost and curves.

    Only the settings that differ are shown; curves are aligned by step.
    """
    from producers.cli.commands.compare import compare_runs, print_comparison

    found = compare_runs(client, runs)
    return Output(found, partial(print_comparison, found, metrics=metrics, rows=rows))


@command(None, "trace", example="headrace train trace my-run --sample SAMPLE_ID")
@RUN
@click.option(
    "--sample", required=True, metavar="ID", help="Id of the sample, from `headrace train samples`."
)
def trace(client: Client, run: str, *, sample: str) -> Output:
    """Show the eight hops of one sample.

    Each hop says which file did what, and when. If nothing is learned from the sample, the reason
    follows.
    """
    answer = client.get(f"/runs/{path_segment(run)}/trace", {"sample": sample})
    rows = [
        (
            h.get("hop"),
            h.get("file"),
            h.get("what"),
            h.get("event"),
            str(h.get("at") or "")[11:23] or None,
            None if h.get("ms_since_previous") is None else f"+{h['ms_since_previous']:.0f} ms",
        )
        for h in answer["hops"]
    ]
    reason = answer.get("reason")
    return Output(
        answer,
        table(f"Sample {sample}", ("hop", "file", "what", "event", "at", "after"), rows),
        f"nothing is learned from it: {reason}" if reason else None,
    )


@command(None, "verify", example="headrace train verify my-run")
@RUN
def verify(client: Client, run: str, *, as_json: bool) -> Output:
    """Rebuild a run from its log and compare the results.

    Every policy version and checkpoint is rebuilt from the log and its artifacts alone, and compared
    with what is stored.
    """
    from producers.cli.commands.history.verify import verify_run

    return verify_run(client, run, quiet=as_json)


@command(None, "export", example="headrace train export my-run --to tensorboard --follow")
@RUN
@click.option("--to", "tracker", required=True, type=click.Choice(TRACKERS), help="The tracker.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("curves"),
    show_default=True,
    help="Directory for TensorBoard files and W&B offline runs.",
)
@click.option(
    "--project", default="headrace", show_default=True, help="W&B project or MLflow experiment."
)
@click.option("--offline", is_flag=True, help="W&B only: write files for a later `wandb sync`.")
@click.option("--uri", help="MLflow only: the tracking URI.")
@click.option("--follow", is_flag=True, help="Keep exporting until the run ends.")
def export(
    client: Client,
    run: str,
    *,
    tracker: str,
    directory: Path,
    project: str,
    offline: bool,
    uri: str | None,
    follow: bool,
) -> Output:
    """Export the curves of a run to a tracker.

    It needs the tracker's library on this machine: pip install 'headrace[export]'.
    """
    from producers.cli.commands.export import export_run, opener_for

    open_sink = opener_for(tracker, directory=directory, project=project, offline=offline, uri=uri)
    exported = export_run(client, run, open_sink, follow=follow)
    return Output(exported, f"{count_of(exported['steps'], 'step')}: {exported['place']}")
