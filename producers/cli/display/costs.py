"""Costs as text and as rows of a table."""

import math
from collections.abc import Mapping, Sequence

from producers.cli.display.output import Document
from producers.cli.errors import Failure

LIMITS = ("max_cost", "max_tokens", "max_hours")
COLUMNS = ("cost", "hours", "wasted", "sampled", "trained", "discarded", "calls", "stored")


def cost_row(line: Document, *, by: str) -> tuple[object, ...]:
    """A line of the ledger in the order of COLUMNS, behind its name."""
    return (
        name_of(line, by=by),
        dollars(line["cost"]),
        hours_text(line["device_hours"]),
        f"{wasted_share(line):.1%}" if line["wasted"] else None,
        f"{line['tokens_sampled']:,}",
        f"{line['tokens_trained']:,}",
        f"{line['tokens_discarded']:,}",
        dollars(line["calls_usd"]) if line["calls_usd"] else None,
        f"{line['stored_bytes'] / 1e6:.1f} MB",
    )


def short_cost(line: Document | None) -> tuple[object, ...]:
    """The money, the device-hours and the wasted share of a run."""
    return (None,) * 3 if line is None else cost_row(line, by="run")[1:4]


def name_of(line: Document, *, by: str) -> str:
    """The name of a line: of its run, workspace or user, or the number of its step."""
    if by == "step" and "@" in line["key"]:
        owner, _, step = line["key"].rpartition("@")
        return f"{line['name'] or owner} {'(no step)' if step == '-1' else step}"
    if by == "workspace" and line["key"] != "total":
        return str(line.get("workspace_name") or line["key"] or "(none)")
    if by == "run" or line["key"] == "total":
        return str(line["name"] or line["key"])
    return str(line["key"] or "(unknown)")


def dollars(amount: float | None) -> str | None:
    """An amount of US dollars; small ones with more digits."""
    if amount is None:
        return None
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4g}"


def hours_text(hours: Mapping[str, float]) -> str | None:
    """Device-hours by kind of device, in seconds where they are few."""
    return ", ".join(f"{kind} {_duration(value)}" for kind, value in hours.items()) or None


def wasted_share(line: Document) -> float:
    """The share of all device-seconds that repeated and lost attempts took."""
    total = sum(line["effects"].values())
    return sum(line["wasted"].values()) / total if total else 0.0


def cost_facts(line: Document) -> list[tuple[str, object]]:
    """The lines of a run about what it cost."""
    facts: list[tuple[str, object]] = [
        ("cost", dollars(line["cost"])),
        ("device_hours", hours_text(line["device_hours"])),
        ("tokens", _tokens(line)),
    ]
    if line["wasted"]:
        parts = (f"{effect} {seconds:.1f} s" for effect, seconds in line["wasted"].items())
        facts.append(("wasted", f"{wasted_share(line):.1%}: {', '.join(parts)}"))
    if line["cost_per_reward_point"] is not None:
        facts.append(("cost_per_reward_point", dollars(line["cost_per_reward_point"])))
    return facts


def past_facts(past: Document) -> list[tuple[str, object]]:
    """An estimate from the ledger of like runs."""
    steps = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in past["step_s"].items())
    return [
        ("measured of", ", ".join(past["runs"])),
        ("measured step", steps),
        ("measured in all", hours_text(past["device_hours"])),
        ("measured tokens", f"{past['tokens']:,}"),
        ("measured cost", dollars(past["cost"])),
    ]


def _tokens(line: Document) -> str:
    sampled, trained = line["tokens_sampled"], line["tokens_trained"]
    return f"{sampled:,} sampled, {trained:,} trained, {line['tokens_discarded']:,} discarded"


def _duration(hours: float) -> str:
    return f"{hours:.2f} h" if hours >= 1 else f"{hours * 3600:.1f} s"


def parse_limits(given: Sequence[str]) -> Mapping[str, float]:
    """Limits of a budget from `max_cost=20`. Raises Failure for another name, or for text that is not a
    positive number."""
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in LIMITS or not 0 < number < math.inf:
            raise Failure(
                "VALIDATION",
                f"--raise {text!r} is not a limit; write one of {', '.join(LIMITS)}, = and a positive "
                "number, like max_cost=20",
            )
        found[name] = int(number) if name == "max_tokens" else number
    return found
