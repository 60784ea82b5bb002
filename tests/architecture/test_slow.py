"""`make slow` shows the longest tests and the share of each folder, and names what takes too long."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import slow

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="3" time="10.0"
 timestamp="2026-11-26T18:08:53.806792+00:00">
<testcase classname="tests.e2e.test_run" name="test_a_run[fast]" time="7.500" />
<testcase classname="tests.unit.schemas.toml.test_parser" name="test_a" time="1.000"><failure />
</testcase>
<testcase classname="tests.unit.schemas.test_ids" name="test_b" time="1.500" />
</testsuite></testsuites>
"""


def test_the_longest_tests_and_the_share_of_each_folder_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "venv-test.xml").write_text(REPORT)
    monkeypatch.setattr("sys.argv", ["slow", str(tmp_path)])
    slow.main()
    assert capsys.readouterr().out.splitlines() == [
        "3 tests took 10 s in all processes; the longest 3, of 10 s:",
        "     7.5 s  tests/e2e/test_run::test_a_run[fast]",
        "     1.5 s  tests/unit/schemas/test_ids::test_b",
        "     1.0 s  tests/unit/schemas/toml/test_parser::test_a",
        "by folder:",
        "     7.5 s   75%  tests/e2e",
        "     2.5 s   25%  tests/unit/schemas",
    ]


Ledger = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ledger:
    """The exit code of `make slow`, and what it says of what takes too long."""

    def judge(before: str = "", after: str = "", patterns: str = "") -> tuple[int, list[str]]:
        (tmp_path / "venv-test.xml").write_text(REPORT.replace(before, after) if before else REPORT)
        (tmp_path / "slow_tests.txt").write_text(f"A reason:\n    {patterns}\n")
        monkeypatch.setattr(slow, "LISTED", tmp_path / "slow_tests.txt")
        monkeypatch.setattr("sys.argv", ["slow", str(tmp_path)])
        code = 0
        try:
            slow.main()
        except SystemExit as end:
            code = int(str(end.code))
        said = capsys.readouterr().out.splitlines()
        return code, [line for line in said if line.startswith(("warning: ", "FAILED: "))]

    return judge


@pytest.mark.parametrize(
    ("before", "after", "code", "says"),
    [
        (
            "1.500",
            "2.100",
            0,
            "warning: tests/unit/schemas/test_ids::test_b took 2 s and may take 2",
        ),
        (
            "1.500",
            "6.100",
            1,
            "FAILED: tests/unit/schemas/test_ids::test_b took 6 s and may take 2",
        ),
        ("7.500", "20.100", 0, "warning: tests/e2e/test_run took 20 s and may take 20"),
        ("7.500", "60.100", 1, "FAILED: tests/e2e/test_run took 60 s and may take 20"),
        ('time="10.0"', 'time="2701"', 0, "warning: all stages took 2701 s and may take 2700"),
        ('time="10.0"', 'time="4051"', 1, "FAILED: all stages took 4051 s and may take 2700"),
    ],
)
def test_a_slow_test_is_named_and_one_that_takes_three_times_its_limit_fails(
    before: str, after: str, code: int, says: str, ledger: Ledger
) -> None:
    ended, said = ledger(before, after)
    assert ended == code
    assert len(said) == 1
    assert said[0].startswith(f"{says}; make ")


def test_a_test_within_its_limit_is_not_named(ledger: Ledger) -> None:
    assert ledger() == (0, [])


@pytest.mark.parametrize("pattern", ["tests/unit/schemas/test_ids", "tests/unit/schemas/*"])
def test_a_listed_file_may_take_as_long_as_it_needs(pattern: str, ledger: Ledger) -> None:
    assert ledger("1.500", "99.000", pattern) == (0, [])


def test_a_test_that_two_targets_run_counts_once(tmp_path: Path, ledger: Ledger) -> None:
    (tmp_path / "venv312-test-python.xml").write_text(REPORT)
    assert ledger() == (0, [])


def test_the_shorter_time_of_a_test_that_two_targets_run_counts(
    tmp_path: Path, ledger: Ledger
) -> None:
    """Python 3.12's tests run beside those with vLLM: 0.6 s became 7 s, and CI failed."""
    (tmp_path / "venv312-test-python.xml").write_text(REPORT.replace("1.500", "99.000"))
    assert ledger() == (0, [])
    code, said = ledger("1.500", "6.100")
    assert (code, len(said)) == (1, 1)
    assert "test_ids::test_b took 6 s" in said[0]


def test_a_class_is_part_of_its_file() -> None:
    assert slow.file_of("tests/contracts/test_user_code/TestGVisor::test_a") == (
        "tests/contracts/test_user_code"
    )


def test_each_listed_file_exists() -> None:
    root = slow.LISTED.parents[1]
    patterns = slow.listed(slow.LISTED.read_text())
    assert len(patterns) > 50
    assert not [one for one in patterns if not list(root.glob(f"{one.removesuffix('*')}*"))]


def test_without_reports_it_says_how_to_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["slow", str(tmp_path)])
    with pytest.raises(SystemExit, match="make test REPORTS="):
        slow.main()
