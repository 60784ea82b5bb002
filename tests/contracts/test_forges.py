"""The clients of GitHub, Gitea and GitLab keep one contract, against servers that check what the real
ones check."""

from collections.abc import Iterator

import pytest

from tests.contracts.forges_suite import ForgesSuite
from tests.kit.forge_server import FakeForge, FakeGitea, FakeGitHub, FakeGitLab, serving


class TestGitHub(ForgesSuite):
    @pytest.fixture
    def server(self) -> Iterator[FakeForge]:
        with serving(FakeGitHub()) as server:
            yield server


class TestGitea(ForgesSuite):
    @pytest.fixture
    def server(self) -> Iterator[FakeForge]:
        with serving(FakeGitea()) as server:
            yield server


class TestGitLab(ForgesSuite):
    @pytest.fixture
    def server(self) -> Iterator[FakeForge]:
        with serving(FakeGitLab()) as server:
            yield server
