"""Several curves in one chart with common axes, as SVG."""

import math
from collections.abc import Sequence

from producers.dashboard.charts import Points, part_of

WIDTH, HEIGHT = 600.0, 150.0


def overlay(curves: Sequence[Points]) -> list[str]:
    """The points of a polyline for each curve; empty for one without two finite values."""
    finite = [[(s, v) for s, v in points if math.isfinite(v)] for points in curves]
    everything = [point for points in finite for point in points]
    if not everything:
        return ["" for _ in curves]
    first, last = min(s for s, _ in everything), max(s for s, _ in everything)
    least, largest = min(v for _, v in everything), max(v for _, v in everything)
    across = WIDTH / max(1, last - first)
    return [
        " ".join(
            f"{(step - first) * across:.1f},{HEIGHT * (1 - part_of(value, least, largest)):.1f}"
            for step, value in points
        )
        if len(points) > 1
        else ""
        for points in finite
    ]
