"""The report of an evaluation as a page: figures and rows, and no markup from user code."""

from typing import Any

from producers.cli.commands.evaluations.report import MOST_LISTED, markdown


def row(number: int, error: str | None = None) -> dict[str, Any]:
    rewards = [1.0, None] if error else [1.0, 0.0]
    return {
        "row": number,
        "attempts": 2,
        "passed": 1,
        "failed": 1 if error else 0,
        "reward": 0.5,
        "rewards": rewards,
        "error": error,
    }


def report(*rows: dict[str, Any]) -> dict[str, object]:
    about = {"model": "provider:openai/m", "dataset": "d", "rollout": "r", "attempts": 2}
    metrics = {"eval/pass@1": 0.5, "eval/pass@2": 1.0}
    return {**about, "pass_threshold": 1.0, "seed": 0, "metrics": metrics, "rows": list(rows)}


def test_figures_and_rows_are_tables() -> None:
    page = markdown(report(row(0), row(3)))
    assert page.startswith("# Evaluation of provider:openai/m\n")
    assert "| eval/pass@2 | 1 |" in page
    assert "| 3 | 1 | 2 | 0.5 | \\[1.0, 0.0\\] | - |" in page


def test_text_of_user_code_is_no_markup_and_is_cut() -> None:
    hostile = "x | y\n# Title ![](http://a/b) <script> `c` \x1b[31m" + "z" * 999
    line = next(line for line in markdown(report(row(0, hostile))).splitlines() if "script" in line)
    assert line.count(" | ") == 5
    assert "\\<script\\>" in line
    assert "\\!\\[\\]" in line
    assert "\x1b" not in line
    assert len(line) < 400


def test_a_long_list_of_rows_is_cut() -> None:
    page = markdown(report(*(row(number) for number in range(MOST_LISTED + 2))))
    assert "2 more rows are in report.json." in page
