"""A real Chromium for tests, and what it must not do on a page of ours.

The program is Debian's, or the one that HEADRACE_TEST_CHROMIUM names. Without it the tests that need it
are skipped, but they fail in CI. `make test-browser` installs it, and fetches axe-core.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.kit.postgres import missing

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(os.environ.get("HEADRACE_TEST_AXE", ROOT / ".tools" / "axe-core" / "axe.min.js"))
WITHIN_MS = 60_000
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    program = os.environ.get("HEADRACE_TEST_CHROMIUM") or next(
        (found for name in PROGRAMS if (found := shutil.which(name))), None
    )
    if program is None:
        missing("no Chromium: apt-get install chromium, or set HEADRACE_TEST_CHROMIUM")
    with sync_playwright() as playwright:
        # User namespaces may be missing in a container, and the pages are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watch:
    """What a page did that none of ours may do. A page that asks is told no, unless `says_yes`."""

    dialogs: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    says_yes: bool = False

    def assert_nothing(self) -> None:
        """Raises AssertionError if anything happened."""
        assert not self.dialogs, self.dialogs
        assert not self.outside, self.outside
        assert not self.errors, self.errors


@contextmanager
def visiting(browser: Browser, url: str, **options: Any) -> Iterator[tuple[BrowserContext, Watch]]:
    """A fresh profile that is watched. `url` is the only server that it may ask."""
    context = browser.new_context(viewport=options.pop("viewport", DESK), **options)
    context.set_default_timeout(WITHIN_MS)
    watch = Watch()

    def note_dialog(dialog: Any) -> None:
        watch.dialogs.append(dialog.message)
        if watch.says_yes:
            dialog.accept()
        else:
            dialog.dismiss()

    def note_request(request: Any) -> None:
        if not request.url.startswith((url, "data:")):
            watch.outside.append(request.url)

    def note_message(message: Any) -> None:
        # The browser itself says that a page was answered with an error, which some pages are to be.
        is_status = message.text.startswith("Failed to load resource: the server responded")
        if message.type == "error" and not is_status:
            watch.errors.append(message.text)

    context.on("dialog", note_dialog)
    context.on("request", note_request)
    context.on("console", note_message)
    context.on("weberror", lambda error: watch.errors.append(str(error.error)))
    try:
        yield context, watch
    finally:
        context.close()


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with a page, one line per element. Skips the test without axe-core."""
    if not AXE.is_file():
        missing(f"no axe-core at {AXE}: run `make axe`, or set HEADRACE_TEST_AXE")
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate(AXE.read_text())
    found = page.evaluate(
        "(rules) => axe.run(document, {runOnly: rules, resultTypes: ['violations']})", list(RULES)
    )
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def open_link(page: Page, link: str) -> None:
    """Open a link of `POST /login-links`, and press its button."""
    page.goto(link)
    page.get_by_role("button", name="Sign in as").click()
    page.wait_for_url(lambda url: "/login" not in url, timeout=WITHIN_MS)
