"""Every page."""

import re

import httpx
import pytest

from tests.kit.application import Application
from tests.kit.showcase import fill
from tests.kit.signed_in import form_key_in
from tests.kit.story import beginning
from tests.kit.tenants import Tenant, create_api_key, tenant

pytestmark = pytest.mark.postgres

HERE = "http://127.0.0.1"
PAGES = (
    "/",
    "/?search=no-such&status=failed",
    "/runs/{run_name}",
    "/runs/{run}/samples",
    "/runs/{run}/samples?colour=logprob",
    "/runs/{run}/health",
    "/runs/{run}/events",
    "/runs/{run}/events?types=rl.run.finished",
    "/runs/{run}/timeline",
    "/runs/{run}/timeline?step=7",
    "/runs/{run}/trace/{run}-train-1-0-0.0",
    "/compare?runs={run_name},{run}",
    "/evals",
    "/evals/{evaluation}",
    "/datasets",
    "/datasets/{dataset}",
    "/workspaces",
    "/workspaces/{workspace}",
    "/workspaces/{workspace}/alerts",
    "/sessions",
    "/api-keys",
    "/platform",
    "/new",
    "/new-evaluation",
)


@pytest.fixture
async def owner(app: Application) -> Tenant:
    return await tenant(app, "first", "/repo")


async def test_every_page_is_whole_small_and_without_code_of_its_own(
    owner: Tenant, browser: httpx.AsyncClient
) -> None:
    for path in PAGES:
        page = await browser.get(owner.fill(path))
        assert page.status_code == 200, (path, page.text)
        assert len(page.content) < 100_000
        assert "</html>" in page.text
        assert "<script>" not in page.text
        assert "style=" not in page.text
        assert "script-src 'self'" in page.headers["content-security-policy"]


async def test_every_page_lists_its_keys_and_a_visitor_gets_none(
    owner: Tenant, browser: httpx.AsyncClient
) -> None:
    page = (await browser.get(owner.fill("/runs/{run}/samples"))).text
    assert '<dialog id="keys"' in page
    used = set(re.findall(r'data-shortcut="(.)"', (await browser.get("/")).text + page))
    assert used <= set(re.findall(r"<kbd>(.)</kbd>", page))
    browser.cookies.clear()
    assert '<dialog id="keys"' not in (await browser.get("/login")).text


async def test_the_platform_shows_its_disks(browser: httpx.AsyncClient) -> None:
    text = (await browser.get("/platform")).text
    assert re.search(r"<td>[0-9.]+ [kMGT]?B \([0-9]+%\)</td>", text)
    assert re.search(r"The database has [0-9.]+ MB", text)


async def test_a_reader_without_rights_sees_that_there_are_dead_letters(
    app: Application, browser: httpx.AsyncClient
) -> None:
    assert "There are none." in (await browser.get("/platform")).text
    await fill(app, steps=2)
    seen = (await browser.get("/platform")).text
    assert "Process again" in seen
    assert "None is on this page" in (await browser.get("/platform?offset=90")).text
    reader = await create_api_key(app, "reader", "read")
    await browser.post("/login", data={"api_key": reader})
    unseen = (await browser.get("/platform")).text
    assert "Process again" not in unseen
    assert "1 wait. An API key with the scope <code>admin</code> shows them." in unseen


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("first-run", "got 1"),
        ("first-run,first-run", "got 1"),
        (",".join("abcdefghi"), "got 9"),
        ("first-run,nobody", "there is no run &#39;nobody&#39;"),
    ],
)
async def test_a_comparison_needs_two_to_eight_different_runs(
    owner: Tenant, browser: httpx.AsyncClient, names: str, reason: str
) -> None:
    assert owner.run_name == "first-run"
    for path in ("/compare", "/compare.json"):
        answer = await browser.get(path, params={"runs": names})
        assert answer.status_code == (404 if "nobody" in names else 400)
        assert reason in answer.text


async def test_runs_are_narrowed_by_exact_names_and_sorted(
    owner: Tenant, browser: httpx.AsyncClient
) -> None:
    link = owner.fill('href="/runs/{run_name}"')
    name = owner.fill("{workspace}")
    assert link in (await browser.get("/", params={"workspace": name})).text
    listed = (await browser.get("/")).text
    for key in ("dataset", "model"):
        ((value, _),) = set(re.findall(rf'href="/\?{key}=([^"]*)"()', listed))
        assert link in (await browser.get(f"/?{key}={value}")).text
    for key in ("dataset", "model", "rollout", "workspace"):
        none = await browser.get("/", params={key: "no such name"})
        assert link not in none.text
        assert "No run matches" in none.text
    for order in ("newest", "oldest", "reward", "name"):
        assert link in (await browser.get("/", params={"sort": order})).text
    assert (await browser.get("/", params={"sort": "'; drop"})).status_code == 400


async def test_the_log_of_a_run_is_filtered_by_severity(
    owner: Tenant, browser: httpx.AsyncClient
) -> None:
    page = owner.fill("/runs/{run}")
    assert '<p class="info">' in (await browser.get(page)).text
    assert '<p class="info">' in (await browser.get(page, params={"level": "info"})).text
    assert '<p class="info">' not in (await browser.get(page, params={"level": "error"})).text
    assert (await browser.get(page, params={"level": "loud"})).status_code == 400


async def test_a_page_that_is_not_there_says_so(browser: httpx.AsyncClient) -> None:
    for path in ("/runs/nothing", "/evals/nothing", "/datasets/nothing", "/workspaces/nothing"):
        page = await browser.get(path)
        assert page.status_code == 404
        assert "nothing" in page.text
        assert page.headers["content-type"].startswith("text/html")


async def test_a_program_that_asks_for_nothing_gets_a_problem_document(
    app: Application, browser: httpx.AsyncClient
) -> None:
    for path in ("/api/v1/nothing", "/api/nothing"):
        answer = await app.api.get(path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
    answer = await app.api.get("/v1/nothing")
    assert answer.json()["error"]["code"] == "not_found"
    page = await browser.get("/nothing")
    assert (page.status_code, "there is nothing at /nothing" in page.text) == (404, True)


async def test_curves_are_json_and_csv(owner: Tenant, browser: httpx.AsyncClient) -> None:
    found = (await browser.get(f"/runs/{owner.run}/curves.json")).json()
    assert found["status"] == "finished"
    assert all(len(point) == 2 for point in found["curves"]["rollout/raw_reward"])
    text = (await browser.get(f"/runs/{owner.run}/curve.csv")).text
    assert text.startswith("step,value\n")
    wrong = await browser.get(f"/runs/{owner.run}/curves.json?range=1y")
    assert wrong.status_code == 400
    assert "must be one of 1h, 6h, 24h, all" in wrong.text
    part = (await browser.get(f"/runs/{owner.run}/curves.json?first=2&last=2")).json()
    assert [step for step, _ in part["curves"]["rollout/raw_reward"]] == [2]
    backwards = await browser.get(f"/runs/{owner.run}/curves.json?first=3&last=2")
    assert backwards.status_code == 400


async def test_files_of_pages_are_kept_by_browsers(browser: httpx.AsyncClient) -> None:
    page = (await browser.get("/")).text
    addresses = [part.partition('"')[0] for part in page.split('="')[1:] if "/static/" in part[:9]]
    assert len(addresses) >= 3
    for address in addresses:
        found = await browser.get(address)
        assert found.status_code == 200
        assert "immutable" in found.headers["cache-control"]
    assert (await browser.get("/static/../formats.py")).status_code == 404
    assert (await browser.get("/static/nothing.js")).status_code == 404


async def test_a_button_that_comes_too_late_says_so(
    app: Application, browser: httpx.AsyncClient
) -> None:
    """As two tabs press them: the one that is second gets a page, whatever it asks for."""
    await app.append(list(beginning("r1", "first", steps=2)))
    key = form_key_in((await browser.get("/runs/r1")).text)
    pressed = {}
    for verb in ("pause", "stop", "pause", "resume", "approve", "stop"):
        answer = await browser.post(f"/runs/r1/{verb}", data={"form_key": key})
        assert answer.status_code in (303, 409), answer.text
        pressed[verb] = answer
    assert pressed["approve"].status_code == 409
    assert pressed["approve"].headers["content-type"].startswith("text/html")
    assert "does not wait for approval" in pressed["approve"].text
