"""A repository, and the mirrors that follow it."""

from pathlib import Path

import pytest

from infra.repositories.git.mirrors import GitRepositories
from infra.settings.git import LAPTOP
from tests.kit.platform import make_workspace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_workspace(tmp_path / "source")


@pytest.fixture
def repositories(tmp_path: Path) -> GitRepositories:
    return GitRepositories(tmp_path / "mirrors", settings=LAPTOP)
