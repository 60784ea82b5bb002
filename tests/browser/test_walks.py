"""The ways of people through the dashboard, in Chromium and on a real platform with real runs."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from playwright.sync_api import Browser, Page, expect

from infra.operations.local import embedded_postgres
from infra.operations.local.home import read_state
from schemas.events import RunPauseRequested
from tests.kit.chromium import WITHIN_MS, Watch, open_link, visiting
from tests.kit.platform import (
    TINY,
    Platform,
    eventually,
    git,
    make_workspace,
    platform,
    run_config,
)
from tests.kit.pushed_workspace import toml_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
]

TRIGGER = """
[[trigger]]
branches = ["main"]
config = "configs/short.toml"
name = "pushed-{number}"
require_approval = true
"""
SHORT = {"training": {"rollout_batch_size": 1}, "advanced": {"max_steps": 2}}
LONG = {"training": {"rollout_batch_size": 1}, "advanced": {"max_steps": 5000}}
REWARD = "[data-line='rollout/raw_reward'] b"

expect.set_options(timeout=WITHIN_MS)


@dataclass(frozen=True)
class Installation:
    """A platform that follows a repository, and a working copy of it."""

    platform: Platform
    copy: Path

    @property
    def api_key(self) -> str:
        return (self.platform.home / "token").read_text().strip()

    def submit(self, **changes: Any) -> str:
        return self.platform.submit(run_config(**changes), workspace="math")


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("walks")
    files = {"headrace.toml": TRIGGER, "configs/short.toml": toml_of(**SHORT)}
    copy, bare = make_workspace(root / "copy", files), root / "math.git"
    git(root, "clone", "-q", "--bare", str(copy), str(bare))
    git(copy, "remote", "add", "origin", str(bare))
    with platform(root / "home", environment={"HEADRACE_POLL_S": "1"}) as running:
        running.upload("numbers")
        request = {"url": str(bare), "name": "math", "forge": "none"}
        answer = running.post("/workspaces/connect", request)
        assert answer.status_code in (200, 201), answer.text
        eventually(_worker_of(running), within_s=60, what="a worker that can train")
        yield Installation(running, copy)


def _worker_of(running: Platform) -> Callable[[], object]:
    """Pages wait a minute for a figure, and on a busy machine torch alone may take that long to load."""
    return lambda: [w for w in running.get("/status")["workers"] if "train" in w["lanes"]] or None


@pytest.fixture(scope="module")
def finished(installation: Installation) -> tuple[str, str]:
    """Two finished runs that differ in one setting."""
    runs = (installation.submit(**SHORT), installation.submit(**_with_rate(5e-3)))
    for run in runs:
        installation.platform.wait(run, "finished")
    return runs


def _with_rate(rate: float) -> dict[str, dict[str, Any]]:
    return {**SHORT, "training": {**SHORT["training"], "lr": rate}}


@pytest.fixture
def visit(browser: Browser, installation: Installation) -> Iterator[tuple[Page, Watch]]:
    """A page of a person who has signed in by a link."""
    with visiting(browser, installation.platform.url) as (context, watch):
        page = context.new_page()
        link = installation.platform.post("/login-links", {}).json()["url"]
        open_link(page, link)
        yield page, watch
        watch.assert_nothing()


def test_a_link_opens_once_and_an_api_key_signs_in(
    browser: Browser, installation: Installation
) -> None:
    url = installation.platform.url
    link = installation.platform.post("/login-links", {}).json()["url"]
    with visiting(browser, url) as (context, watch):
        page = context.new_page()
        open_link(page, link)
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        assert "code=" not in page.url
        page.get_by_role("button", name="Sign out").click()
        page.goto(link)
        expect(page.get_by_role("alert")).to_contain_text("has been used")
        page.goto(f"{url}/platform")
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("not a valid API key")
        page.get_by_label("API key").fill(installation.api_key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Platform")).to_be_visible()
        assert page.evaluate("document.cookie") == ""
        watch.assert_nothing()


def test_a_run_is_submitted_from_the_form_watched_paused_resumed_and_stopped(
    visit: tuple[Page, Watch],
) -> None:
    page, watch = visit
    page.get_by_role("link", name="New run").click()
    page.get_by_label("Name", exact=True).fill("from-the-form")
    page.get_by_label("Workspace", exact=True).fill("math")
    page.get_by_label("Config", exact=True).fill(toml_of(**LONG).replace("lr =", "learning ="))
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("alert")).to_contain_text("training.learning")
    page.get_by_label("Config", exact=True).fill(toml_of(**LONG))
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("status")).to_contain_text("5000 steps")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="from-the-form")).to_be_visible()
    page.evaluate("window.isTheSamePage = true")
    assert changes(page, REWARD) != changes(page, REWARD)
    assert page.evaluate("window.isTheSamePage"), "the curves moved without a new page"
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.get_by_role("button", name="Stop").click()  # asks first, and is told no
    assert watch.dialogs == ["Stop this run? It cannot be resumed."]
    watch.dialogs.clear()
    watch.says_yes = True
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("h1 .status")).to_have_text("stopped")
    watch.dialogs.clear()


def changes(page: Page, selector: str) -> str:
    """A figure of the page once it is another one than now."""
    element = page.locator(selector)
    before = element.text_content()
    expect(element).not_to_have_text(before or "")
    return element.text_content() or ""


def test_the_answers_of_a_group_are_read_and_ordered(
    visit: tuple[Page, Watch], installation: Installation, finished: tuple[str, str]
) -> None:
    page, _ = visit
    page.goto(f"{installation.platform.url}/runs/{finished[0]}")
    page.get_by_role("link", name="Samples").click()
    answers = page.get_by_role("region", name="Answers of the group").get_by_role("article")
    expect(answers).to_have_count(4)
    expect(page.get_by_role("region", name="Prompt")).to_contain_text("Say ")
    page.get_by_label("Order").select_option("reward")
    page.get_by_role("button", name="Show").click()
    assert "order=reward" in page.url
    headings = page.get_by_role("article").get_by_role("heading").all_text_contents()
    rewards = [
        float(found[1]) for text in headings if (found := re.search(r"reward ([\d.]+)", text))
    ]
    assert len(rewards) == 4
    assert rewards == sorted(rewards, reverse=True)


def test_two_runs_are_compared(
    visit: tuple[Page, Watch], installation: Installation, finished: tuple[str, str]
) -> None:
    page, _ = visit
    page.goto(installation.platform.url)
    names = [installation.platform.info(run)["run"]["name"] for run in finished]
    for name in names:
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare runs")).to_be_visible()
    charts = page.get_by_role("region", name="Curves").locator("figure canvas")
    expect(charts.first).to_be_visible()
    settings = page.get_by_role("region", name="Settings that differ")
    expect(settings.get_by_role("rowheader")).to_have_text(["training.lr"])
    expect(settings).to_contain_text("0.005")
    assert all(name in (page.text_content("main") or "") for name in names)


def test_a_checkpoint_is_deployed_and_chatted_with(
    visit: tuple[Page, Watch], installation: Installation, finished: tuple[str, str]
) -> None:
    page, watch = visit
    page.goto(f"{installation.platform.url}/runs/{finished[0]}")
    page.get_by_role("link", name="Deploy").last.click()
    page.get_by_label("Name", exact=True).fill("sums")
    page.get_by_role("button", name="Deploy").click()
    row = page.get_by_role("row", name=re.compile("^sums"))
    expect(row.locator(".status")).to_have_text("active")
    row.get_by_role("link", name="Chat").click()
    expect(page.get_by_label("Right")).to_have_value(f"{TINY}:sums")
    expect(page.get_by_label("Left")).to_have_value(TINY)
    ask(page, "Say 3")
    expect(page.locator("#state")).to_have_text("Both models have answered.")
    ask(page, "Say 4")
    expect(page.get_by_role("log").locator(".exchange")).to_have_count(2)
    expect(page.locator("#state")).to_have_text("Both models have answered.")
    answers = page.get_by_role("log").get_by_role("article").locator("pre").all_text_contents()
    assert len(answers) == 4
    assert all(answers)
    assert not [answer for answer in answers if answer.startswith("No answer")]
    page.goto(f"{installation.platform.url}/deployments/sums")
    expect(page.get_by_role("region", name="Table of API keys")).to_contain_text("root")
    page.get_by_role("link", name="Deployments").click()
    watch.says_yes = True
    row.get_by_role("button", name="Undeploy").click()
    expect(row.locator(".status")).to_have_text("inactive")
    watch.dialogs.clear()


def ask(page: Page, question: str) -> None:
    """Ask both models of the playground for a short answer."""
    page.get_by_role("textbox", name="Question").fill(question)
    if not page.get_by_label("Temperature").is_visible():
        page.get_by_text("Settings").click()
    page.get_by_label("Tokens of the answer").fill("8")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Ask both").click()


def test_without_javascript_pages_are_read_and_models_answer(
    browser: Browser, installation: Installation, finished: tuple[str, str]
) -> None:
    running = installation.platform
    ref = f"{running.info(finished[0])['run']['name']}@last"
    asked = running.post("/deployments", {"checkpoint": ref, "name": "plain"})
    assert asked.status_code == 202, asked.text
    eventually(lambda: _is_active(running, "plain"), within_s=60, what="it is deployed")
    link = running.post("/login-links", {}).json()["url"]
    with visiting(browser, running.url, java_script_enabled=False) as (context, watch):
        page = context.new_page()
        open_link(page, link)
        page.goto(f"{running.url}/runs/{finished[0]}")
        expect(page.locator("figure svg polyline").first).to_be_visible()
        page.goto(f"{running.url}/playground")
        ask(page, "Say 3")
        ask(page, "Say 4")
        answers = page.get_by_role("log").get_by_role("article").locator("pre")
        expect(answers).to_have_count(4)
        assert not [a for a in answers.all_text_contents() if a.startswith("No answer")]
        watch.assert_nothing()


def _is_active(running: Platform, name: str) -> bool | None:
    status = running.get(f"/deployments/{name}")["deployment"]["status"]
    return True if status == "active" else None


def test_two_tabs_press_different_buttons_and_a_session_ends_in_between(
    visit: tuple[Page, Watch], installation: Installation
) -> None:
    page, watch = visit
    watch.says_yes = True
    running, run = installation.platform, installation.submit(**LONG)
    address = f"{running.url}/runs/{run}"
    running.wait(run, "running")
    other = page.context.new_page()
    for tab in (page, other):
        tab.goto(address)
        expect(tab.get_by_role("button", name="Pause")).to_be_visible()
    cookies = page.context.cookies()
    page.context.clear_cookies()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("body")).to_contain_text("Sign in again in another tab")
    assert running.info(run)["run"]["phase"] != "paused"
    page.context.add_cookies(cookies)  # type: ignore[arg-type]  # what it gave is what it takes
    page.go_back()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    other.get_by_role("button", name="Stop").click()
    expect(other.locator("h1 .status")).to_have_text("stopped")
    page.goto(address)
    expect(page.get_by_role("button", name="Resume")).to_have_count(0)
    assert running.wait(run, "stopped")
    watch.dialogs.clear()


def test_a_pushed_run_is_approved(visit: tuple[Page, Watch], installation: Installation) -> None:
    page, _ = visit
    git(installation.copy, "commit", "-q", "--allow-empty", "-m", "a change")
    git(installation.copy, "push", "-q", "origin", "main")
    page.goto(installation.platform.url)
    page.get_by_role("link", name=re.compile("pushed-")).click()
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_role("button", name="Approve")).to_have_count(0)
    expect(page.locator("h1 .status")).to_have_text("finished")


def test_a_dead_letter_is_processed_again(
    visit: tuple[Page, Watch], installation: Installation
) -> None:
    page, _ = visit
    running, spoilt = installation.platform, f"spoilt-{uuid4().hex[:8]}"
    do_in_a_thread(_spoil(running.home, spoilt))
    letter = eventually(lambda: _letter_about(running, spoilt), within_s=60, what="a dead letter")
    page.goto(f"{running.url}/platform")
    row = page.get_by_role("region", name="Dead letters").get_by_role("row", name=letter)
    expect(row).to_contain_text(RunPauseRequested.type)
    row.get_by_role("button", name="Process again").click()
    expect(page.get_by_role("heading", name="Platform")).to_be_visible()
    # It still cannot be read, so it may be listed again as another letter.
    expect(page.get_by_role("row", name=letter)).to_have_count(0)
    shown = running.get(f"/dead-letters/{letter}")["dead_letter"]
    assert shown["redriven_at"] is not None


def _letter_about(running: Platform, about: str) -> str | None:
    found = running.get("/dead-letters", about=about)["dead_letters"]
    return str(found[0]["id"]) if found else None


def do_in_a_thread(work: Any) -> None:
    """Do this in a thread, because Playwright keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


async def _spoil(home: Path, run: str) -> None:
    """Append an event that cannot be read, as a broken writer would."""
    connection = await asyncpg.connect(embedded_postgres.place_for(home).url)
    try:
        await connection.execute(
            "insert into events (id, stream, version, type, schema_version, data, run_id, correlation)"
            " values ($1, $2, 1, $3, 1, $4, $5, $1)",
            uuid4(),
            RunPauseRequested(run=run).stream,
            RunPauseRequested.type,
            '{"run": 7}',
            run,
        )
    finally:
        await connection.close()


def test_an_open_page_goes_on_after_the_server_was_killed(
    browser: Browser, installation: Installation
) -> None:
    running = installation.platform
    run = installation.submit(**LONG)
    link = running.post("/login-links", {}).json()["url"]
    with visiting(browser, running.url) as (context, watch):
        page = context.new_page()
        open_link(page, link)
        page.goto(f"{running.url}/runs/{run}")
        changes(page, REWARD)
        page.evaluate("window.isTheSamePage = true")
        before = _control_pid(running)
        os.kill(before, signal.SIGKILL)
        eventually(lambda: _other_pid(running, before), within_s=60, what="another server")
        eventually(lambda: True if running.get("/status") else None, within_s=60, what="it answers")
        changes(page, REWARD)
        changes(page, REWARD)
        assert page.evaluate("window.isTheSamePage")
        page.get_by_role("link", name="Runs").click()
        expect(
            page.get_by_role("heading", name="Runs")
        ).to_be_visible()  # the session is still valid
        assert not watch.dialogs
        assert not watch.outside
    running.post(f"/runs/{run}/stop", {})
    running.wait(run, "stopped")


def _control_pid(running: Platform) -> int:
    state = read_state(running.home)
    assert state is not None
    [pid] = [child.pid for child in state.children if child.name == "control" and child.pid]
    return pid


def _other_pid(running: Platform, before: int) -> int | None:
    state = read_state(running.home)
    pids = [child.pid for child in state.children if child.name == "control"] if state else []
    return next((pid for pid in pids if pid and pid != before), None)
