"""Formats what answers hold for people: bytes, seconds, remaining time, and states of samples, runs and
checkpoints."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from producers.cli.display.output import Part, one_line, printable, table, time_ago

SIZES = ("KiB", "MiB", "GiB", "TiB")
TIMES = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def format_size(number: object) -> str | None:
    """A number of bytes with a unit, as in `1.5 MiB`. None if it is not a number."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if number < 1024:
        return f"{number:.0f} bytes"
    scaled = float(number)
    for unit in SIZES:
        scaled /= 1024
        if scaled < 1024 or unit == SIZES[-1]:
            break
    return f"{scaled:,.1f} {unit}"


def distinct_names(things: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """The names of the things of a list. Where several have one name, because they belong to several
    workspaces, the id stands behind it: commands take the id."""
    num = Counter(thing.get("name") for thing in things)
    return [
        f"{thing.get('name')} ({thing.get('id')})"
        if num[thing.get("name")] > 1
        else thing.get("name")
        for thing in things
    ]


def format_duration(seconds: float) -> str:
    """A number of seconds with a unit, as in `45 s` or `1.5 h`."""
    for length, unit in TIMES:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.2g} s"


def format_count(number: float) -> str:
    """A large number in short form, as in `596 M`."""
    for length, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= length:
            return f"{number / length:.3g}{unit}"
    return f"{number:.0f}"


def time_left(seconds: float | None) -> str:
    """The remaining time, as in ` (about 2.0 min left)`, or an empty string when it is not known."""
    return "" if seconds is None else f" (about {format_duration(seconds)} left)"


def hub_cell(checkpoint: Mapping[str, Any]) -> str:
    """Where the newest upload of a checkpoint to a hub stands: `org/name`, with its state unless it is
    there; empty without an upload."""
    name, status = checkpoint.get("hub_repository"), checkpoint.get("hub_status")
    if not name:
        return ""
    return str(name) if status == "uploaded" else f"{name} ({status})"


def failure_text(sample: Mapping[str, Any]) -> str | None:
    """Why a sample failed, in a line; None if it did not."""
    failure = sample.get("failure")
    if isinstance(failure, Mapping):
        return one_line(f"{failure.get('category')}: {failure.get('message')}")
    return printable(str(failure)) if failure else None


def minute(moment: str) -> str:
    """An ISO time in UTC, to the minute."""
    return f"{moment[:16].replace('T', ' ')} UTC"


def checkpoint_table(title: str, checkpoints: Sequence[Mapping[str, Any]]) -> Part:
    """A table of checkpoints."""
    rows = [
        (
            c.get("ref"),
            c.get("reward"),
            str(c.get("adapter_sha256"))[:16],
            hub_cell(c),
            time_ago(c.get("created_at")),
        )
        for c in checkpoints
    ]
    return table(title, ("ref", "reward", "weights sha256", "hub", "created"), rows)


def run_status(run: Mapping[str, Any]) -> str:
    """The status of a run: `paused` instead of `running` for a paused run."""
    status = str(run.get("status"))
    return "paused" if status == "running" and run.get("phase") == "paused" else status


def run_eta_s(run: Mapping[str, Any], *, now: datetime | None = None) -> float | None:
    """Estimated remaining seconds of a running run, from the mean time of its steps so far; None when it
    is not known."""
    step, total, began = run.get("current_step"), run.get("total_steps"), run.get("started_at")
    if run_status(run) != "running" or not (step and total and began) or step > total:
        return None
    # A fork takes only the steps after that of its parent.
    taken = int(step) - int(run.get("parent_step") or 0)
    if taken <= 0:
        return None
    spent = ((now or datetime.now(UTC)) - datetime.fromisoformat(str(began))).total_seconds()
    return max(0.0, spent) / taken * (int(total) - int(step))


def run_step(run: Mapping[str, Any]) -> str:
    """The progress of a run, as in `3/10 (about 2.0 min left)`."""
    step = f"{run.get('current_step') or 0}/{run.get('total_steps') or '?'}"
    return step + time_left(run_eta_s(run))


def count_of(number: int, noun: str) -> str:
    """A number with its noun: `1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def teaching_facts(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The teacher, the reward models and the curriculum in the config of a run, if it has them."""
    advanced: Mapping[str, Any] = config.get("advanced") or {}
    facts = []
    if teacher := advanced.get("teacher"):
        hint = ", with a hint" if advanced.get("teacher_hint") else ""
        facts.append(("teacher", f"{teacher}{hint}"))
    models = [
        f"{one['name']}: {one['model']} (weight {one.get('weight', 1.0):g})"
        if one.get("name")
        else f"{one['model']} (weight {one.get('weight', 1.0):g})"
        for one in advanced.get("reward_models") or ()
    ]
    if models:
        facts.append(("reward models", ", ".join(models)))
    curriculum = {k: v for k, v in (advanced.get("curriculum") or {}).items() if v is not None}
    if curriculum:
        facts.append(("curriculum", ", ".join(f"{k} {v:g}" for k, v in curriculum.items())))
    return facts
