"""Means with standard errors and 95 % intervals, and paired differences. Pure functions.

The rows of a dataset are the sample, and the attempts at one row are not independent of each other. So a
standard error is robust to clusters, and a cluster is a row: with N attempts x at C rows,

    se = sqrt(C / (C - 1) * sum over rows of (sum over the row's attempts of (x - mean))^2) / N

(Liang and Zeger 1986, with the correction CR1; for evaluations: Miller 2024, "Adding Error Bars to
Evals", arXiv:2411.00640). With as many attempts at every row it is the standard error of the mean of
the rows' means.

- The interval of a mean is mean +- t * se, with Student's t at C - 1 degrees of freedom. Where all rows
  have the same mean, their spread says nothing about other rows, so there is no interval: 0.5 to 0.5
  from two rows would claim that every other row has this mean too.
- The interval of a proportion (all attempts are 0 or 1) is that of Wilson 1927, which stays within 0 and
  1 and has a width when all attempts are equal (Brown, Cai and DasGupta 2001; Bowyer et al. 2025,
  arXiv:2503.01747). Its number of attempts is the effective one, mean * (1 - mean) / se^2 (Korn and
  Graubard 1998), and the number of rows when all of them are equal.
- A difference of two evaluations is the mean of the differences of the rows' means, over the rows that
  both have, with the interval of a mean (paired differences, Miller 2024, section 4.2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""

SMALL_T = (12.706204736, 4.302652730, 3.182446305, 2.776445105, 2.570581836)
"""The 97.5 % quantiles of Student's t with 1 to 5 degrees of freedom."""

NOISE = 1e-9
"""Means that differ by this much or less are the same, but for rounding. Values are at most 1e6."""

SE, LOW, HIGH = "/se", "/low", "/high"
"""The ends of the names of a standard error and of the two ends of an interval."""

Interval = tuple[float, float]
"""The ends of a 95 % interval."""

Rows = Sequence[Sequence[float]]
"""The values of the attempts at each row. A row without any counts nowhere."""


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean over the attempts at `num_rows` rows, its standard error, and its 95 % interval. One row
    has neither of these, and rows of equal means have no interval unless they are a proportion."""

    mean: float
    num_rows: int
    se: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> Interval | None:
        return None if self.low is None or self.high is None else (self.low, self.high)

    def figures(self, name: str) -> dict[str, float]:
        """The estimate as figures: the mean under its name, and the others with what follows it."""
        pairs = (("", self.mean), (SE, self.se), (LOW, self.low), (HIGH, self.high))
        return {name + suffix: value for suffix, value in pairs if value is not None}


def estimate_mean(rows: Rows, *, is_proportion: bool | None = None) -> MeanEstimate | None:
    """The mean of all attempts, each with the same weight; None without any. It is a proportion if all
    attempts are 0 or 1, unless `is_proportion` says it."""
    rows = [row for row in rows if row]
    values = [value for row in rows for value in row]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(rows) < 2:
        return MeanEstimate(mean, len(rows))
    of_rows = (math.fsum(value - mean for value in row) for row in rows)
    squares = math.fsum(found * found for found in of_rows)
    se = math.sqrt(squares * len(rows) / (len(rows) - 1)) / len(values)
    if se <= NOISE:
        se = 0.0
    if is_proportion is None:
        is_proportion = all(value in (0.0, 1.0) for value in values)
    if is_proportion:
        low, high = _wilson(mean, _effective_number(mean, se, num_rows=len(rows)))
    elif se == 0.0:
        return MeanEstimate(mean, len(rows), se)
    else:
        half = t_quantile(len(rows) - 1) * se
        low, high = mean - half, mean + half
    return MeanEstimate(mean, len(rows), se, low, high)


def estimate_difference(first: Rows, second: Rows) -> MeanEstimate | None:
    """The mean of the differences of the rows' means, `second` less `first`. The two have the same rows
    in the same order, and a row without a value on one side is left out. None without any row. Rows that
    all differ by the same give no interval."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a and b]
    differences = [math.fsum(b) / len(b) - math.fsum(a) / len(a) for a, b in pairs]
    if differences and max(differences) - min(differences) <= NOISE:
        return MeanEstimate(math.fsum(differences) / len(differences), len(differences))
    return estimate_mean([(value,) for value in differences], is_proportion=False)


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t. Beyond five degrees of freedom it is the expansion of Cornish
    and Fisher (Abramowitz and Stegun 26.7.5), to 2e-4."""
    if degrees <= len(SMALL_T):
        return SMALL_T[degrees - 1]
    z, n = Z, float(degrees)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / n**power for power, term in enumerate(terms))


@dataclass(frozen=True, slots=True)
class IntervalFigure:
    """A figure by its name, with its standard error and its interval if it has them."""

    key: str
    value: float
    se: float | None
    interval: Interval | None


def interval_of(figures: Mapping[str, float], name: str) -> Interval | None:
    """The interval of a figure among figures; None without one."""
    low, high = figures.get(name + LOW), figures.get(name + HIGH)
    return None if low is None or high is None else (low, high)


def is_figure(name: str) -> bool:
    """Whether a name is that of a figure, and not of a standard error or the end of an interval."""
    return not name.endswith((SE, LOW, HIGH))


def figures_in_order(figures: Mapping[str, float]) -> list[IntervalFigure]:
    """The figures by their names, each with its standard error and its interval."""
    names = sorted(name for name in figures if is_figure(name))
    return [
        IntervalFigure(name, figures[name], figures.get(name + SE), interval_of(figures, name))
        for name in names
    ]


def _effective_number(mean: float, se: float, *, num_rows: int) -> float:
    """How many independent attempts would have this standard error, at least one for two rows."""
    spread = mean * (1 - mean)
    return max(num_rows / 2, spread / (se * se)) if se > 0 and spread > 0 else float(num_rows)


def _wilson(mean: float, n: float) -> tuple[float, float]:
    middle = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    return max(0.0, min(mean, middle - half)), min(1.0, max(mean, middle + half))
