"""Three cells of `make matrix` on a tiny task: three objectives, each in another execution mode."""

from pathlib import Path

import pytest

from bench.matrix import STEPS, Cell, Digits, Result, cells, matrix
from tests.kit.tomls import run_issues

THREE = (
    Cell("grpo", "fully_async"),
    Cell("ppo", "sync"),
    Cell("importance_sampling", "one_step_off_async"),
)


def test_the_matrix_has_every_cell_that_is_allowed() -> None:
    allowed = set()
    for algorithm in {cell.algorithm for cell in cells()}:
        for mode in {cell.mode for cell in cells()}:
            if not run_issues(Digits().config(Cell(algorithm, mode))):
                allowed.add(Cell(algorithm, mode))
    assert allowed == set(cells())
    assert len(allowed) == 59


def test_a_cell_has_learned_when_it_ends_better_than_it_began() -> None:
    cell = Cell("grpo", "sync")
    assert Result(cell, "finished", first=0.1, last=0.2).learned
    assert not Result(cell, "finished", first=0.2, last=0.1, before=0.0, after=1.0).learned
    assert Result(Cell("sft", "sync"), "finished", before=0.1, after=0.2).learned
    assert not Result(cell, "over time").learned


@pytest.mark.kills
@pytest.mark.processes
@pytest.mark.torch
@pytest.mark.postgres
@pytest.mark.slow
def test_three_cells_learn_and_a_second_start_only_reads_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = list(matrix(tmp_path, Digits(), THREE, limit_s=300))
    assert [result.status for result in found] == ["finished"] * 3
    for result in found:
        assert result.learned, result
        assert result.last is not None
        assert result.first is not None
        assert result.last > result.first + 0.05, result
        assert result.before is not None
        assert result.after is not None
    assert STEPS == 20
    assert list(matrix(tmp_path, Digits(), THREE, limit_s=300)) == found
