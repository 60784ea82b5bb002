"""Links that show one run to everyone who has them: what they show, and what they never show."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from infra.identity.shares import MOST_SHARES
from schemas.events import EvaluationSettled, RunDeleted
from tests.kit.application import Application
from tests.kit.markup import structure
from tests.kit.showcase import FAILED, FIRST, SECOND
from tests.kit.signed_in import form_key_in, signed_in
from tests.kit.tenants import create_api_key, tenant

pytestmark = pytest.mark.postgres

GONE = "this link is unknown, has expired, or was revoked"
PRIVATE = (
    "ada",
    "sums",
    "c" * 12,
    "baseline",
    "paper",
    "best so far",
    "About 130.",
    "max_response",
)
"""What the showcase has of the run and of others: people, workspace, commit, tags, note, answers, log
and config."""


@pytest.fixture
def showcase_steps() -> int:
    return 3


@pytest.fixture
async def filled(app: Application) -> Application:
    return app


@pytest.fixture
async def visitor(filled: Application) -> AsyncIterator[httpx.AsyncClient]:
    """A browser without a session."""
    transport = httpx.ASGITransport(filled.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


async def share(app: Application, run: str = FIRST, **body: int) -> tuple[str, str]:
    """Make a link. Returns its id and its path."""
    answer = await app.api.post(f"/api/v1/runs/{run}/shares", json=body)
    assert answer.status_code == 201, answer.text
    url = httpx.URL(answer.json()["url"])
    return answer.json()["id"], f"{url.path}?{url.query.decode()}"


async def test_a_link_shows_one_run_and_nothing_else(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    _, path = await share(filled)
    page = await visitor.get(path)
    assert page.status_code == 200
    structure(page.text)
    assert "gsm8k-grpo-3e-6" in page.text
    assert "<polyline" in page.text
    assert {text for text in PRIVATE if text in page.text} == set()
    assert "gsm8k-gspo" not in page.text
    links = set(re.findall(r'(?:href|src|action)="([^"]*)"', page.text))
    assert {link for link in links if not link.startswith(("/static/", "#"))} == {"/"}
    assert "<form" not in page.text
    for run in (FAILED, SECOND):
        other = await visitor.get((await share(filled, run))[1])
        assert "ZeroDivisionError" not in other.text
        assert "gsm8k-grpo-3e-6" not in other.text


async def test_a_link_shows_the_interval_of_the_held_out_reward(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    metrics = {"eval/reward/low": 0.25, "eval/reward/high": 0.75}
    for step in (0, 2):
        settled = EvaluationSettled(run=FIRST, step=step, reward=0.5, metrics=metrics)
        await filled.append([settled])
    page = await visitor.get((await share(filled))[1])
    assert '<path class="whiskers line-1" d="M' in page.text
    assert "Bars: 95 % interval of the validation reward." in page.text
    assert 'title="95 % interval">0.25 to 0.75</small>' in page.text


async def test_a_link_is_neither_listed_nor_kept_nor_told_to_others(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    page = await visitor.get((await share(filled))[1])
    assert "noindex" in page.headers["x-robots-tag"]
    assert '<meta name="robots" content="noindex' in page.text
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "set-cookie" not in page.headers


async def test_the_key_of_a_link_opens_only_its_page(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    _, path = await share(filled)
    key = path.partition("key=")[2]
    for other in (f"/runs/{FIRST}", f"/runs/{FIRST}/run.json", f"/runs/{FIRST}/samples", "/"):
        answer = await visitor.get(f"{other}?key={key}")
        assert (answer.status_code, answer.headers["location"][:6]) == (303, "/login"), other
        answer = await visitor.get(other, headers={"Cookie": f"headrace_session={key}"})
        assert answer.status_code == 303, other
    bearer = {"Authorization": f"Bearer {key}"}
    assert (await visitor.get(f"/api/v1/runs/{FIRST}", headers=bearer)).status_code == 401
    assert (await visitor.post(path)).status_code == 405
    ignored = await visitor.get(f"{path}&ref={SECOND}&run={SECOND}")
    assert "gsm8k-grpo-3e-6" in ignored.text, "nothing in the address chooses another run"


async def test_a_link_that_is_over_says_nothing(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    identity, path = await share(filled)
    _, expired = await share(filled)
    _, deleted = await share(filled, SECOND)
    await filled.database.durable.execute(
        "update run_shares set expires_at = clock_timestamp() where share <> $1 and run = $2",
        identity,
        FIRST,
    )
    answer = await filled.api.delete(f"/api/v1/runs/{FIRST}/shares/{identity}")
    assert answer.json() == {"revoked": identity}
    await filled.append([RunDeleted(run=SECOND)])
    for gone in (path, expired, deleted, path[:-1], "/shared", "/shared?key=", "/shared?key=%ff"):
        page = await visitor.get(gone)
        assert page.status_code == 404, gone
        assert GONE in page.text
        assert "gsm8k" not in page.text
    assert (await visitor.get(f"/shared?key={'a' * 5000}")).status_code == 404
    again = await filled.api.delete(f"/api/v1/runs/{FIRST}/shares/{identity}")
    assert again.status_code == 404


async def test_the_key_is_stored_nowhere(
    filled: Application, visitor: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    _, path = await share(filled)
    key = path.partition("key=")[2]
    await visitor.get(path)
    await visitor.get(path, headers={"Host": "elsewhere"})
    await visitor.post(path)
    await filled.services.audit.flush(everything=True)
    pool = filled.database.durable
    tables = await pool.fetch("select tablename from pg_tables where schemaname = current_schema()")
    for (table,) in tables:
        query = f"select count(*) from {table} t where t::text like $1"
        assert await pool.fetchval(query, f"%{key}%") == 0, table
    ours = [record for record in caplog.records if not record.name.startswith("httpx")]
    assert not [record for record in ours if key in record.getMessage()]
    listed = (await filled.api.get(f"/api/v1/runs/{FIRST}/shares")).text
    assert key not in listed


async def test_only_members_who_control_a_run_may_share_it(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    identity, path = await share(filled)
    ours = await tenant(filled, "ours", "/repo")
    stranger = {"Authorization": f"Bearer {ours.api_key}"}
    here = f"/api/v1/runs/{FIRST}/shares"
    assert (await visitor.post(here, json={}, headers=stranger)).status_code == 404
    assert (await visitor.get(here, headers=stranger)).status_code == 404
    assert (await visitor.delete(f"{here}/{identity}", headers=stranger)).status_code == 404
    own = f"/api/v1/runs/{ours.run}/shares/{identity}"
    assert (await visitor.delete(own, headers=stranger)).status_code == 404
    reader = {"Authorization": f"Bearer {await create_api_key(filled, 'reader', 'read')}"}
    assert (await visitor.post(here, json={}, headers=reader)).status_code == 403
    assert (await visitor.get(here, headers=reader)).status_code == 403
    assert (await visitor.get(path)).status_code == 200, "the link still works"


async def test_a_run_has_a_bounded_number_of_links_and_none_lasts_for_ever(
    filled: Application,
) -> None:
    for days in (0, 91, "7"):
        answer = await filled.api.post(f"/api/v1/runs/{FIRST}/shares", json={"days": days})
        assert answer.status_code == 400
    open_now = len((await filled.api.get(f"/api/v1/runs/{FIRST}/shares")).json()["shares"])
    for _ in range(MOST_SHARES - open_now):
        await share(filled, days=1)
    answer = await filled.api.post(f"/api/v1/runs/{FIRST}/shares", json={})
    assert answer.status_code == 409
    assert "revoke one" in answer.json()["detail"]


async def test_of_simultaneous_requests_at_the_limit_one_makes_a_link(filled: Application) -> None:
    path = f"/api/v1/runs/{FIRST}/shares"
    open_now = len((await filled.api.get(path)).json()["shares"])
    for _ in range(MOST_SHARES - 1 - open_now):
        await share(filled, days=1)
    durable = filled.database.durable
    run = await durable.fetchval("select run from run_shares limit 1")
    async with durable.take_turns(f"links of {run}") as other:
        request = asyncio.create_task(filled.api.post(path, json={"days": 1}))
        await asyncio.wait([request], timeout=0.5)
        await other.execute(
            "insert into run_shares (share, sha256, run, created_by, expires_at) "
            "select 'other', sha256('other'), run, created_by, expires_at from run_shares limit 1"
        )
    assert (await request).status_code == 409


async def test_links_are_made_and_revoked_on_a_page(
    filled: Application, visitor: httpx.AsyncClient
) -> None:
    async with signed_in(filled) as browser:
        here = f"/runs/{FAILED}/shares"
        page = (await browser.get(here)).text
        assert "No link is open." in page
        assert '/shares">Share</a>' in (await browser.get(f"/runs/{FAILED}")).text
        assert (await browser.post(here, data={"days": "7"})).status_code == 403
        key = form_key_in(page)
        assert (await browser.post(here, data={"form_key": key, "days": "91"})).status_code == 400
        made = (await browser.post(here, data={"form_key": key, "days": "7"})).text
        link = re.search(r"<pre[^>]*>https?://[^/]*(/shared\?key=[^<]*)</pre>", made)
        assert link is not None
        assert (await visitor.get(link[1])).status_code == 200
        listed = (await browser.get(here)).text
        assert link[1] not in listed, "it is shown once"
        button = re.search(r'action="([^"]*/revoke)"', listed)
        assert button is not None
        assert (await browser.post(button[1], data={"form_key": key})).status_code == 303
        assert (await visitor.get(link[1])).status_code == 404
