"""`make slow` shows the longest tests and the share of each folder."""

from pathlib import Path

import pytest

from tests import slow

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="3">
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


def test_without_reports_it_says_how_to_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["slow", str(tmp_path)])
    with pytest.raises(SystemExit, match="make test REPORTS="):
        slow.main()
