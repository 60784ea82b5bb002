"""The fixtures of the unmodified client: its environment, and those of its rollouts."""

from pathlib import Path

import pytest

from tests.kit.package_environment import kept_environments
from tests.osmosis.client import osmosis_program

__all__ = ["kept_environments"]


@pytest.fixture(scope="session")
def program() -> Path:
    """The program `osmosis`."""
    return osmosis_program()
