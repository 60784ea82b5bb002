"""Datasets of the unmodified client: small and in parts, up and down, overwritten, and refused."""

from pathlib import Path

import pytest

from tests.osmosis import workspace
from tests.osmosis.team import Team

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.slow,
]

ROW_BYTES = 1_000_000


@pytest.fixture(scope="module")
def data(team: Team) -> Path:
    """The folder with the files of datasets."""
    return team.directory / "data"


def rows_with(size: int, count: int) -> str:
    """Rows of this many bytes each, and a little more."""
    return workspace.rows_of(
        [{"user_prompt": f"{n}" + "a" * size, "ground_truth": str(n)} for n in range(count)]
    )


def test_a_small_dataset_goes_up_and_down(team: Team, data: Path, tmp_path: Path) -> None:
    sent = data / "small.jsonl"
    sent.write_text(workspace.rows_of(workspace.ROWS))
    made = team.member.run("dataset", "upload", str(sent), "--yes")["resource"]
    assert (made["status"], made["row_count"]) == ("uploaded", 8)
    back = tmp_path / "back.jsonl"
    team.viewer.run("dataset", "download", "small", "-o", str(back))
    assert back.read_bytes() == sent.read_bytes()
    [listed] = [d for d in team.viewer.run("dataset", "list")["items"] if d["file_name"] == "small"]
    assert listed["id"] == made["id"]
    shown = team.viewer.run("dataset", "preview", "small", "--rows", "2")["data"]["rows"]
    assert shown == workspace.ROWS[:2]
    assert team.viewer.run("dataset", "logs", "small")["items"]


def test_a_dataset_of_100_mb_goes_up_in_parts_and_down(
    team: Team, data: Path, tmp_path: Path
) -> None:
    sent = data / "large.jsonl"
    sent.write_text(rows_with(ROW_BYTES, 100))
    made = team.member.run("dataset", "upload", str(sent), "--yes")["resource"]
    assert (made["status"], made["row_count"]) == ("uploaded", 100)
    logged = team.member.run("dataset", "logs", "large")["items"]
    assert "parts" in logged[0]["message"]
    back = tmp_path / "back.jsonl"
    team.viewer.run("dataset", "download", "large", "-o", str(back))
    assert back.read_bytes() == sent.read_bytes()


def test_a_name_is_overwritten_when_that_is_wanted(team: Team, data: Path) -> None:
    sent = data / "again.jsonl"
    sent.write_text(workspace.rows_of(workspace.ROWS))
    team.member.run("dataset", "upload", str(sent), "--yes")
    sent.write_text(workspace.rows_of(workspace.ROWS[:5]))
    refused = team.member.refused("dataset", "upload", str(sent), "--yes")
    assert refused.code == "CONFLICT"
    team.member.run("dataset", "upload", str(sent), "--overwrite", "--yes")
    assert team.viewer.run("dataset", "info", "again")["data"]["row_count"] == 5


def test_a_viewer_uploads_nothing(team: Team, data: Path) -> None:
    sent = data / "viewed.jsonl"
    sent.write_text(workspace.rows_of(workspace.ROWS))
    refused = team.viewer.refused("dataset", "upload", str(sent), "--yes")
    assert "API key with the scope" in refused.message
    assert team.viewer.refused("dataset", "info", "viewed").code == "NOT_FOUND"
