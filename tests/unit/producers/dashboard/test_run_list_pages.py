"""The pages of the list of runs, and the links between them."""

import csv
import html
import io
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from infra.readmodel.run_pages import RunPlace
from tests.kit.application import Application
from tests.kit.hostile_strings import hostile_strings
from tests.kit.markup import structure
from tests.kit.postgres import execute
from tests.kit.signed_in import signed_in

pytestmark = pytest.mark.postgres

NUM_RUNS = 120
ADD = """insert into runs (run, name, algorithm, execution_mode, model, dataset, config, dataset_ref,
created_at, reward)
select 'r' || n, 'run-' || lpad(n::text, 3, '0'), 'grpo', 'sync', 'm & m', 'd', '{{}}', '{{}}',
'2026-01-01Z'::timestamptz + n / 2 * interval '1 hour', nullif(n % 7, 3) / 7.0
from generate_series({first}, {last}) n"""
PLACE = RunPlace("newest", datetime(2026, 1, 1, tzinfo=UTC), "r1")


@pytest.fixture
async def browser(app: Application, database_url: str) -> AsyncIterator[httpx.AsyncClient]:
    await execute(database_url, ADD.format(first=1, last=NUM_RUNS))
    async with signed_in(app) as client:
        yield client


def _names(text: str) -> list[str]:
    return re.findall(r'<a href="/runs/(run-\d+)">', text)


def _link(text: str, rel: str) -> str | None:
    """The address of the page before ("prev") or after ("next")."""
    found = re.search(rf'<a rel="{rel}" href="([^"]*)">', text)
    return html.unescape(found[1]) if found else None


@pytest.mark.parametrize("order", ["newest", "oldest", "reward", "name"])
async def test_links_lead_through_all_runs_and_back(
    browser: httpx.AsyncClient, database_url: str, order: str
) -> None:
    start = str(httpx.URL("/", params={"sort": order, "model": "m & m", "limit": "50"}))
    whole = _names((await browser.get(f"{start}0")).text)
    assert sorted(whole) == [f"run-{n:03}" for n in range(1, NUM_RUNS + 1)]
    address, seen, pages = start, list[str](), list[str]()
    while address:
        page = (await browser.get(address)).text
        pages.append(page)
        seen += _names(page)
        address = _link(page, "next") or ""
        asked = parse_qs(urlsplit(address).query) if address else {}
        assert asked.keys() <= {"sort", "model", "limit", "after"}
        assert asked.get("model") in (["m & m"], None)
    assert seen == whole
    counts = ["1 to 50 of 120", "51 to 100 of 120", "101 to 120 of 120"]
    assert [f"<span>{count}</span>" in page for count, page in zip(counts, pages, strict=True)] == [
        True
    ] * 3
    middle = await browser.get(_link(pages[2], "prev") or "")
    assert _names(middle.text) == whole[50:100]
    first = await browser.get(_link(middle.text, "prev") or "")
    assert (_names(first.text), _link(first.text, "prev")) == (whole[:50], None)
    assert _link(pages[0], "prev") is None
    assert "First page" not in pages[0]
    assert "First page" in pages[2]


async def test_a_page_stays_the_same_while_runs_arrive(
    browser: httpx.AsyncClient, database_url: str
) -> None:
    first = (await browser.get("/")).text
    assert ">Newer</a>" not in first
    assert ">Older</a>" in first
    second = _link(first, "next") or ""
    shown = _names((await browser.get(second)).text)
    await execute(database_url, ADD.format(first=NUM_RUNS + 2, last=NUM_RUNS + 4))
    page = (await browser.get(second)).text
    assert _names(page) == shown
    assert "54 to 103 of 123" in page
    newer = (await browser.get(_link(page, "prev") or "")).text
    assert _names(newer) == _names(first)
    newest = (await browser.get(_link(newer, "prev") or "")).text
    assert _names(newest) == ["run-124", "run-122", "run-123"]
    assert ">Older</a>" in newest


async def test_json_and_csv_have_the_addresses_of_the_other_pages(
    browser: httpx.AsyncClient,
) -> None:
    asked = {"sort": "name", "limit": "50"}
    first = (await browser.get("/runs.json", params=asked)).json()
    assert (first["has_more"], first["previous_cursor"]) == (True, None)
    after = {**asked, "after": first["next_cursor"]}
    second = (await browser.get("/runs.json", params=after)).json()
    assert [run["name"] for run in second["runs"]] == [f"run-{n:03}" for n in range(51, 101)]
    before = {**asked, "before": second["previous_cursor"]}
    assert (await browser.get("/runs.json", params=before)).json()["runs"] == first["runs"]
    answer, seen = await browser.get("/runs.csv", params=asked), list[str]()
    while True:
        seen += [line["name"] for line in csv.DictReader(io.StringIO(answer.text))]
        if "next" not in answer.links:
            break
        answer = await browser.get(answer.links["next"]["url"])
    assert seen == [f"run-{n:03}" for n in range(1, NUM_RUNS + 1)]
    assert "prev" in answer.links


async def test_a_bad_cursor_is_a_page_that_says_what_to_do(browser: httpx.AsyncClient) -> None:
    # NUL is refused before any page is asked.
    bad = [text for text in hostile_strings(60) if text and "\0" not in text]
    for text in [*bad, "x" * 9000, PLACE.cursor[:-1], PLACE.cursor + "="]:
        sent = text.encode("utf-8", "replace").decode()
        for name in ("after", "before"):
            answer = await browser.get("/", params={name: sent})
            assert answer.status_code == 400, text
            assert answer.headers["content-type"].startswith("text/html")
            assert "remove it to see the first page" in answer.text
            structure(answer.text)
    other = await browser.get("/", params={"after": PLACE.cursor, "sort": "reward"})
    assert (other.status_code, "sort=reward" in other.text) == (400, True)
    for path in ("/runs.json", "/runs.csv"):
        assert (await browser.get(path, params={"after": "x"})).status_code == 400


async def test_parameters_that_name_no_page_are_refused(browser: httpx.AsyncClient) -> None:
    both = await browser.get("/", params={"after": PLACE.cursor, "before": PLACE.cursor})
    assert (both.status_code, "remove one of them" in both.text) == (400, True)
    offset = await browser.get("/runs.json?offset=50")
    assert (offset.status_code, "follow the links" in offset.text) == (400, True)


async def test_a_page_without_runs_leads_to_the_first_one(browser: httpx.AsyncClient) -> None:
    place = RunPlace("newest", datetime(2020, 1, 1, tzinfo=UTC), "r1")
    page = (await browser.get("/", params={"after": place.cursor, "model": "m & m"})).text
    assert "not in the list any more" in page
    assert '<a href="/?model=m+%26+m">First page</a>' in page


async def test_filters_and_the_limit_last_through_the_form_and_the_links_of_cells(
    browser: httpx.AsyncClient,
) -> None:
    asked = {"search": "run-", "sort": "name", "limit": "7", "archived": "false"}
    page = (await browser.get("/", params=asked)).text
    assert '<input type="hidden" name="limit" value="7">' in page
    address = html.unescape(re.findall(r'<td><a href="(/\?[^"]*model=[^"]*)"', page)[0])
    assert parse_qs(urlsplit(address).query) == {
        **{name: [value] for name, value in asked.items()},
        "model": ["m & m"],
    }
    assert len(_names((await browser.get(address)).text)) == 7


async def test_an_archived_run_is_reached_although_another_has_its_name(
    browser: httpx.AsyncClient, database_url: str
) -> None:
    await execute(
        database_url, "update runs set archived_at = now(), name = 'run-002' where run = 'r1'"
    )
    page = (await browser.get("/", params={"archived": "true"})).text
    assert 'name="archived" value="true" checked' in page
    assert '<a href="/runs/r1">run-002</a>' in page
    assert 'value="r1" aria-label="Compare run-002"' in page
    none = (await browser.get("/", params={"archived": "true", "model": "no such"})).text
    assert "No run matches" in none


async def test_a_text_with_a_line_end_is_one_cell(
    browser: httpx.AsyncClient, database_url: str
) -> None:
    await execute(database_url, "update runs set error = E'a\\rb,c\\n\"d\"' where run = 'r1'")
    text = (await browser.get("/runs.csv?search=run-001")).text
    [line] = csv.DictReader(io.StringIO(text, newline=""))
    assert line["error"] == 'a\rb,c\n"d"'
