"""The client of these tests is the vendor's, and its errors are read as it writes them."""

from pathlib import Path

import pytest

from tests.osmosis.client import Osmosis

pytestmark = [pytest.mark.osmosis, pytest.mark.processes]


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
