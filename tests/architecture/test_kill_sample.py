"""Eight runs of `make test` with eight different parts run every kill test."""

from collections import Counter
from pathlib import Path

import pytest

from tests.kit import kill_sample
from tests.kit.kill_sample import PARTS, chosen_part, part_of
from tests.kit.source import ROOT


def test_the_variable_says_which_part_runs(tmp_path: Path) -> None:
    assert chosen_part({}, ROOT) is None
    assert chosen_part({"HEADRACE_TEST_KILLS": "all"}, ROOT) is None
    assert chosen_part({"HEADRACE_TEST_KILLS": "11"}, ROOT) == 3
    sample = {"HEADRACE_TEST_KILLS": "sample"}
    assert chosen_part(sample, ROOT) == chosen_part(sample, ROOT)
    assert chosen_part(sample, tmp_path) in range(PARTS), "without a commit too"


def test_the_part_follows_from_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(PARTS):
        monkeypatch.setattr(kill_sample, "_commit", lambda root, n=number: f"0000000{n}" + "a" * 32)
        assert chosen_part({"HEADRACE_TEST_KILLS": "sample"}, ROOT) == number


def test_every_test_is_in_one_part_and_the_parts_are_alike() -> None:
    counted = Counter(part_of(f"tests/crash/test_x.py::test_y[{n}]") for n in range(800))
    assert sum(counted.values()) == 800
    assert all(60 <= counted[part] <= 140 for part in range(PARTS))


def test_a_part_leaves_out_kill_tests_but_no_twin_and_no_other_test() -> None:
    class Item:
        def __init__(self, name: str, *, kills: bool) -> None:
            self.name, self.nodeid, self.kills = name, f"tests/crash/test_x.py::{name}", kills

        def get_closest_marker(self, mark: str) -> object:
            return object() if self.kills and mark == "kills" else None

    killing, twin, other = (
        Item("test_kills", kills=True),
        Item("test_twin_without", kills=True),
        Item("test_other", kills=False),
    )
    for part in range(PARTS):
        left_out = [one.name for one in (killing, twin, other) if _left_out(one, part)]
        assert left_out == ([] if part == part_of(killing.nodeid) else ["test_kills"])
    assert not _left_out(killing, None)


def _left_out(item: object, part: int | None) -> bool:
    return kill_sample.is_left_out(item, part)  # type: ignore[arg-type]  # has what it reads
