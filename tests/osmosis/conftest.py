"""The fixtures of the unmodified client: its environment, those of its rollouts, and the platforms that
it drives."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kit.package_environment import kept_environments
from tests.kit.platform import platform
from tests.osmosis.client import osmosis_program
from tests.osmosis.team import Team, join

__all__ = ["kept_environments"]


@pytest.fixture(scope="session")
def program() -> Path:
    """The program `osmosis`."""
    return osmosis_program()


@pytest.fixture(scope="module")
def settings() -> Mapping[str, str]:
    """The settings of the platform. A module of tests may have others."""
    return {}


@pytest.fixture(scope="module")
def team(
    program: Path, settings: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    """The people of a workspace, on a platform of their own."""
    root = tmp_path_factory.mktemp("osmosis")
    with platform(root / "home", environment=settings) as started:
        yield join(started, program, root, organisation="acme")
