"""B11's own arithmetic: which results are kept, which are missing, and which curves count as
equal."""

import importlib.util
import os
from pathlib import Path

import pytest

from bench.b11_learning import Curve, Ledger, missing, plot, report


def curve(side: str, seed: int, *rewards: float, wall_s: float = 1.0) -> Curve:
    held_out = tuple((10 * i, reward) for i, reward in enumerate(rewards))
    return Curve(side, seed, held_out, wall_s=wall_s, cpu_s=2.0, load=0.5)


OURS = [curve("headrace", 0, 0.3, 0.5, 0.7), curve("headrace", 1, 0.3, 0.54, 0.74)]


def test_measurements_are_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "b11.jsonl")
    assert ledger.curves(steps=20) == []
    for one in [*OURS, curve("trl", 0, 0.3, 0.4)]:
        ledger.add(one)
    assert ledger.curves(steps=20) == OURS
    assert ledger.curves(steps=10) == [curve("trl", 0, 0.3, 0.4)]


def test_the_sides_alternate_and_only_what_is_missing_is_measured() -> None:
    assert missing([], [0, 1]) == [(0, "headrace"), (0, "trl"), (1, "trl"), (1, "headrace")]
    assert missing(OURS, [0, 1]) == [(0, "trl"), (1, "trl")]


@pytest.mark.parametrize(
    ("theirs", "reached"),
    [
        ([(0.31, 0.53, 0.71, 2.0), (0.31, 0.5, 0.76, 2.0)], True),
        ([(0.31, 0.53, 0.2, 2.0), (0.31, 0.5, 0.25, 2.0)], False),
        ([(0.31, 0.53, 0.71, 0.5), (0.31, 0.5, 0.76, 0.5)], False),
        ([], False),
    ],
    ids=["the same, slower", "another curve", "the same, faster", "nothing yet"],
)
def test_the_report_passes_for_the_same_curve_in_less_time(
    theirs: list[tuple[float, ...]], reached: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        curve("trl", seed, *rewards, wall_s=wall_s)
        for seed, (*rewards, wall_s) in enumerate(theirs)
    ]
    assert report([*OURS, *found]) is reached
    apart = "the same curve within noise: NO" in capsys.readouterr().out
    assert apart == (bool(theirs) and theirs[0][2] < 0.3)


def test_the_plot_is_an_image(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None and not os.environ.get("CI"):
        pytest.skip("needs headrace[bench]")
    path = tmp_path / "curves.png"
    plot([*OURS, curve("trl", 0, 0.3, 0.5, 0.7)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < path.stat().st_size < 150_000
