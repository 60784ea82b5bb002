"""`python -m tests.slow FOLDER`: which tests take long, from the reports that
`make test REPORTS=FOLDER` and the other targets write there."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

SHOWN = 40


def seconds_of(report: Path) -> Iterator[tuple[str, float]]:
    """The tests of a report in JUnit's format, each with its seconds, set-up and tear-down included."""
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        module = case.attrib["classname"].replace(".", "/")
        yield f"{module}::{case.attrib['name']}", float(case.attrib["time"])


def folder_of(test: str) -> str:
    """The folder whose share is told: `tests/e2e`, and for unit tests the part of the code."""
    parts = test.split("::")[0].split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] == ["unit"] else 2])


def lines(seconds: Mapping[str, float]) -> list[str]:
    """The longest tests, then the share of each folder."""
    whole = sum(seconds.values())
    longest = _longest_first(seconds)[:SHOWN]
    folders: dict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        folders[folder_of(test)] += took
    return [
        f"{len(seconds)} tests took {whole:.0f} s in all processes; the longest {len(longest)}, of "
        f"{sum(took for _, took in longest):.0f} s:",
        *(f"{took:8.1f} s  {test}" for test, took in longest),
        "by folder:",
        *(
            f"{took:8.1f} s  {took / (whole or 1):4.0%}  {name}"
            for name, took in _longest_first(folders)
        ),
    ]


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def main() -> None:
    reports = sorted(Path(sys.argv[1]).glob("*.xml"))
    if not reports:
        sys.exit(f"no reports in {sys.argv[1]}; write them with: make test REPORTS={sys.argv[1]}")
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        for test, took in seconds_of(report):
            seconds[test] += took
    sys.stdout.write("\n".join(lines(seconds)) + "\n")


if __name__ == "__main__":
    main()
