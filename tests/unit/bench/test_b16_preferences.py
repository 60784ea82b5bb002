"""B16's own arithmetic: its pairs, which results are kept, and which curves count as equal."""

import json
from itertools import islice
from pathlib import Path

import pytest

from bench.b16_preferences import (
    HELD_OUT,
    PAIRS_PER_STEP,
    PairCurve,
    PairLedger,
    make_pairs,
    report,
    rows_of,
    settings,
)
from tests.kit.tomls import run_issues

MARGINS = (0.0, 0.1, 0.3)


def curve(
    side: str, seed: int, *accuracies: float, lift: float = 0.0, tokens: int = 9
) -> PairCurve:
    points = tuple((3 * i, accuracy) for i, accuracy in enumerate(accuracies))
    margins = tuple((3 * i, margin + lift) for i, margin in enumerate(MARGINS))
    return PairCurve(side, seed, points, 1.0, 2.0, 0.5, margins, tokens)


OURS = [curve("headrace", 0, 0.0, 0.6, 0.8), curve("headrace", 1, 0.0, 0.64, 0.84, lift=0.01)]
THEIRS = [curve("trl", 0, 0.0, 0.62, 0.81), curve("trl", 1, 0.0, 0.6, 0.82, lift=0.02)]


@pytest.mark.parametrize("held_out", [False, True])
def test_a_wrong_answer_has_the_form_of_the_right_one(held_out: bool) -> None:
    pairs = list(islice(make_pairs(held_out=held_out), 200))
    assert len({question for question, _, _ in pairs}) == 200
    for question, right, wrong in pairs:
        assert right != wrong
        numbers = [int(text) for text in question.replace("+", " ").split() if text.isdigit()]
        if question.startswith("Sort"):
            assert right == " ".join(map(str, sorted(numbers)))
            assert sorted(wrong.split()) == sorted(right.split())
        else:
            assert int(right) == sum(numbers)
            assert 0 < abs(int(wrong) - int(right)) <= 10


def test_no_question_is_in_both_splits() -> None:
    train, held_out = (rows_of(steps=12, held_out=split) for split in (False, True))
    assert (len(train), len(held_out)) == (12 * PAIRS_PER_STEP, HELD_OUT)
    asked = [
        {json.loads(row)["prompt"][1]["content"] for row in rows} for rows in (train, held_out)
    ]
    assert not asked[0] & asked[1]
    assert rows_of(steps=2, held_out=False) == train[: 2 * PAIRS_PER_STEP]


def test_the_settings_are_those_of_a_valid_run() -> None:
    assert run_issues(settings(1, steps=12, every=3, model=Path("/models/m.gguf"))) == ()


def test_measurements_are_read_back(tmp_path: Path) -> None:
    ledger = PairLedger(tmp_path / "b16.jsonl")
    assert ledger.curves(steps=6) == []
    for one in OURS:
        ledger.add(one)
    assert ledger.curves(steps=6) == OURS
    assert ledger.curves(steps=12) == []


@pytest.mark.parametrize(
    ("theirs", "reached", "says"),
    [
        (THEIRS, True, "accuracy, last: yes"),
        (
            [curve("trl", 0, 0.0, 0.62, 0.4), curve("trl", 1, 0.0, 0.6, 0.42)],
            False,
            "accuracy, last: NO",
        ),
        (
            [curve("trl", n, 0.0, 0.62, 0.81 + n / 100, lift=0.5) for n in range(2)],
            False,
            "margin, last: NO",
        ),
        (
            [curve("trl", n, 0.0, 0.6, 0.82, lift=n / 100, tokens=10) for n in range(2)],
            False,
            "tokens of the answers: NO",
        ),
        (THEIRS[:1], False, "it takes two seeds of each side"),
    ],
    ids=["the same", "other accuracies", "other margins", "other tokens", "one seed"],
)
def test_the_report_passes_for_the_same_curves_alone(
    theirs: list[PairCurve], reached: bool, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([*OURS, *theirs]) is reached
    assert says in capsys.readouterr().out
