"""`python -m tests.slow FOLDER`: which tests take long, from the reports that
`make test REPORTS=FOLDER` and the other targets write there.

A unit test may take 2 s and a file 20 s, unless `tests/slow_tests.txt` lists it with the reason. From
the first stage to the last, tests may take 45 minutes. What takes longer is named. A busy machine
doubles these times, and stages that run beside each other make every test wait now and then. So the
shortest time of a test that several targets ran counts, and the command fails (exit code 1) only for a
test or a file that takes three times its limit, and for stages that take one and a half times theirs.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

SHOWN = 40
LISTED = Path(__file__).with_name("slow_tests.txt")
TEST_S, FILE_S, STAGES_S = 2.0, 20.0, 45 * 60.0
STAGES = "all stages"
BUSY, STAGES_BUSY = 3.0, 1.5
"""How many times its limit a test, a file or all stages may take on a busy machine."""


class Excess(NamedTuple):
    """Something that took longer than it may. `most_s` is what it may take on a busy machine."""

    name: str
    took_s: float
    limit_s: float
    most_s: float


def seconds_of(report: Path) -> Iterator[tuple[str, float]]:
    """The tests of a report in JUnit's format, each with its seconds, set-up and tear-down included."""
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        module = case.attrib["classname"].replace(".", "/")
        yield f"{module}::{case.attrib['name']}", float(case.attrib["time"])


def file_of(test: str) -> str:
    """The file of a test without its suffix. A class in it is not part of that."""
    found = re.match(r".*?/test_\w+", test)
    return found[0] if found else test.split("::")[0]


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


def listed(text: str) -> tuple[str, ...]:
    """The patterns in the text of `slow_tests.txt`."""
    return tuple(line.strip() for line in text.splitlines() if line.startswith("    "))


def excesses(seconds: Mapping[str, float], patterns: Sequence[str]) -> Iterator[Excess]:
    """The unit tests and the files that took too long and are not listed."""
    files: dict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        files[file_of(test)] += took
    unit = {test: took for test, took in seconds.items() if test.startswith("tests/unit/")}
    for found, limit in ((files, FILE_S), (unit, TEST_S)):
        for name, took in found.items():
            if took > limit and not any(fnmatchcase(file_of(name), one) for one in patterns):
                yield Excess(name, took, limit, BUSY * limit)


def stages(reports: Iterable[Path]) -> Excess | None:
    """Whether too much time passed between the start of the first stage and the end of the last."""
    spans = [
        (start, start + timedelta(seconds=float(suite.attrib["time"])))
        for report in reports
        for suite in ElementTree.parse(report).iter("testsuite")  # noqa: S314 - pytest wrote it
        if (start := datetime.fromisoformat(suite.attrib["timestamp"]))
    ]
    took = (max(end for _, end in spans) - min(start for start, _ in spans)).total_seconds()
    if took <= STAGES_S:
        return None
    return Excess(STAGES, took, STAGES_S, STAGES_BUSY * STAGES_S)


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def main() -> None:
    reports = sorted(Path(sys.argv[1]).glob("*.xml"))
    if not reports:
        sys.exit(f"no reports in {sys.argv[1]}; write them with: make test REPORTS={sys.argv[1]}")
    whole: dict[str, float] = defaultdict(float)
    shortest: dict[str, float] = {}
    for report in reports:
        seconds: dict[str, float] = defaultdict(float)
        for test, took in seconds_of(report):
            seconds[test] += took
            whole[test] += took
        for test, took in seconds.items():
            shortest[test] = min(took, shortest.get(test, took))
    found = {one.name: one for one in excesses(shortest, listed(LISTED.read_text()))}
    if late := stages(reports):
        found[late.name] = late
    sys.stdout.write("\n".join([*lines(whole), *map(_say, found.values())]) + "\n")
    if any(one.took_s > one.most_s for one in found.values()):
        sys.exit(1)


def _say(excess: Excess) -> str:
    name, took_s, limit_s, most_s = excess
    word = "FAILED" if took_s > most_s else "warning"
    advice = f"make it faster, or list its file with a reason in tests/{LISTED.name}"
    if name == STAGES:
        advice = "make the tests faster that are named above"
    return f"{word}: {name} took {took_s:.0f} s and may take {limit_s:.0f}; {advice}"


if __name__ == "__main__":
    main()
