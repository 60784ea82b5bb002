"""The environments of rollouts are kept between test sessions, where user code can read them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.package_environment import CACHE

SHARED = Path("/var/tmp/headrace-test-environments")


@pytest.fixture(scope="session", autouse=True)
def _kept_environments() -> Iterator[None]:
    directory = SHARED if os.geteuid() == 0 else CACHE / "environments"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_ENVIRONMENTS", str(directory))
        yield
