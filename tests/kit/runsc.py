"""gVisor's program for tests: the one that HEADRACE_RUNSC names, or one in the cache, built if Go is
here. Without it the tests that need it are skipped, but they fail in CI."""

import os
from pathlib import Path

import pytest

from schemas.errors import InvalidConfig
from tests.stack.runsc import program


def runsc() -> Path:
    """The program. Skips the test when it cannot be had."""
    if named := os.environ.get("HEADRACE_RUNSC"):
        return Path(named)
    try:
        return program()
    except InvalidConfig as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
