"""A rollout that the vendor's command line makes trains on Headrace, with the vendor's TOML."""

import tomllib
from pathlib import Path

import pytest

from tests.kit.platform import platform
from tests.osmosis import workspace
from tests.osmosis.client import Osmosis

pytestmark = [pytest.mark.osmosis, pytest.mark.processes, pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def osmosis(program: Path, tmp_path: Path) -> Osmosis:
    """The command line in an empty folder, for a platform that is not there."""
    for folder in ("worktree", "person"):
        (tmp_path / folder).mkdir()
    return Osmosis(program, "http://127.0.0.1:9", tmp_path / "person", tmp_path / "worktree")


def test_the_lock_installs_the_version_that_is_tested(osmosis: Osmosis) -> None:
    assert osmosis.text("--version").strip() == "osmosis-ai 0.3.8"


def test_an_error_of_the_client_has_its_code(osmosis: Osmosis) -> None:
    assert osmosis.refused("train", "list").code == "WORKSPACE_REQUIRED"


def test_the_scaffold_of_a_rollout_trains(osmosis: Osmosis, tmp_path: Path) -> None:
    """The scaffold's workflow and grader are written, and nothing else is changed."""
    bare = tmp_path / "sums.git"
    workspace.make_worktree(osmosis.directory, bare, repository="acme/sums", osmosis=osmosis)
    with platform(tmp_path / "home") as started:
        added = started.post("/workspaces", {"url": str(bare), "name": "sums"})
        assert added.status_code == 201, added.text
        started.upload("numbers", workspace.rows_of(workspace.ROWS))
        run = started.submit(tomllib.loads(workspace.TRAINING), workspace="sums")
        info = started.wait(run, "finished")
    assert info["run"]["current_step"] == 4
    assert [checkpoint["step"] for checkpoint in info["checkpoints"]] == [2, 4]
