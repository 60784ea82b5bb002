"""A browser for all tests of this folder, and an installation that has something on every page."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser

from tests.kit.chromium import chromium
from tests.kit.dashboard import ServedDashboard, served_dashboard
from tests.kit.showcase import Showcase, fill


@dataclass(frozen=True)
class Shown:
    """A served dashboard and its pages."""

    dashboard: ServedDashboard
    showcase: Showcase


@pytest.fixture(scope="session")
def browser(postgres_url: str) -> Iterator[Browser]:
    """One browser. The database server comes first, because Playwright keeps a loop of its own running
    in this thread from here on."""
    del postgres_url
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def shown(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    home = tmp_path_factory.mktemp("shown") / "home"
    with served_dashboard(postgres_url, home) as dashboard:
        yield Shown(dashboard, dashboard.run(fill(dashboard.app)))
