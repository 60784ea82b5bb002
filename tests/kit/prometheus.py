"""A strict parser of Prometheus's text format."""

import re

SAMPLE = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"(?:,|$)')


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Metric -> the values of its labels, in order -> value. Raises AssertionError when a metric has no
    HELP and TYPE before its first sample, or when a line cannot be parsed completely."""
    explained: set[str] = set()
    typed: set[str] = set()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            explained.add(line.split()[2])
        elif line.startswith("# TYPE "):
            typed.add(line.split()[2])
        else:
            read = SAMPLE.match(line)
            assert read is not None, line
            name, labels, value = read.groups()
            assert name in explained & typed, line
            assert LABEL.sub("", labels or "") == "", line
            found.setdefault(name, {})[tuple(v for _, v in LABEL.findall(labels or ""))] = float(
                value
            )
    return found
