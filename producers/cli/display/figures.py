"""Figures of evaluations as rows of a table: each with its standard error and its 95 % interval."""

from collections.abc import Mapping, Sequence

from infra.readmodel.estimates import figures_in_order
from producers.cli.display.output import Document, cell_text

COLUMNS = ("key", "value", "standard error", "95 % interval")


def figure_rows(metrics: Mapping[str, float]) -> list[tuple[object, ...]]:
    """The figures by their names, in the order of COLUMNS."""
    return [
        (one.key, one.value, one.se, interval_text(one.interval))
        for one in figures_in_order(metrics)
    ]


def difference_rows(differences: Sequence[Document]) -> list[tuple[object, ...]]:
    """The paired differences of two evaluations, with the number of rows that both have."""
    return [
        (one["key"], one["difference"], one["se"], interval_text(one["interval"]), one["rows"])
        for one in differences
    ]


def value_text(value: float | None, interval: Sequence[float] | None) -> str | None:
    """A value, with its interval in brackets if it has one."""
    if value is None or interval is None:
        return None if value is None else cell_text(value)
    return f"{cell_text(value)} ({interval_text(interval)})"


def interval_text(interval: Sequence[float] | None) -> str | None:
    """An interval as text."""
    if interval is None:
        return None
    low, high = interval
    return f"{cell_text(float(low))} to {cell_text(float(high))}"
