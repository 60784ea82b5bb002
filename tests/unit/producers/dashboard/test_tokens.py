"""The page of tokens: it lists, makes, rotates and revokes them, and shows a secret once."""

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest

from tests.kit.application import Application
from tests.kit.tokens import ask, create_token
from tests.unit.producers.dashboard.test_sign_in import form_key_in, signed_in

pytestmark = pytest.mark.postgres


@pytest.fixture
async def browser(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with signed_in(app) as client:
        yield client


async def send(browser: httpx.AsyncClient, path: str, **fields: str) -> httpx.Response:
    key = form_key_in((await browser.get("/tokens")).text)
    return await browser.post(path, data={"form_key": key, **fields})


def secret_in(page: httpx.Response) -> str:
    return page.text.partition('<pre tabindex="0">')[2].partition("</pre>")[0]


async def status_of(app: Application, token: str) -> int:
    return (await ask(app, "GET", "/api/v1/runs", token)).status_code


async def test_a_token_is_made_with_its_secret_shown_once(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "sums"})
    fields = {"name": "ci", "workspace": "sums", "days": "30", "scope.submit": "on"}
    made = await send(browser, "/tokens", **fields)
    assert made.status_code == 200, made.text
    assert await status_of(app, secret_in(made)) == 200
    page = (await browser.get("/tokens")).text
    assert secret_in(made) not in page
    row = page.partition('<th scope="row">ci</th>')[2].partition("</tr>")[0]
    assert all(text in row for text in (">sums</a>", "submit", "admin"))
    [token] = (await browser.get("/tokens.json")).json()["tokens"]
    assert token["scopes"] == ["submit"]
    stored = await app.database.durable.fetchrow("select * from api_tokens")
    assert stored["expires_at"] - stored["created_at"] > timedelta(days=29.99)
    forever = await send(
        browser, "/tokens", name="old", days="30", never="on", **{"scope.read": "on"}
    )
    assert "It does not expire." in forever.text


async def test_a_refused_form_says_why_and_keeps_what_was_written(
    browser: httpx.AsyncClient,
) -> None:
    wrong = (
        ({"name": "a b", "days": "9", "scope.read": "on"}, 400, "name"),
        ({"name": "ok", "days": "0", "scope.read": "on"}, 400, "a whole number from 1 to 3650"),
        ({"name": "ok", "days": "9"}, 400, "a token needs a scope"),
        ({"name": "ok", "days": "9", "scope.read": "on", "workspace": "no"}, 404, "no"),
    )
    for fields, status, says in wrong:
        answer = await send(browser, "/tokens", **fields)
        assert answer.status_code == status
        problem = answer.text.partition('role="alert"')[2].partition("</div>")[0]
        assert says in problem
        assert f'value="{fields["name"]}"' in answer.text
    assert (await browser.get("/tokens.json")).json()["tokens"] == []


async def test_a_form_with_a_nul_is_refused_as_an_address_is(browser: httpx.AsyncClient) -> None:
    """The database takes none."""
    answer = await send(
        browser, "/tokens", name="ok", days="9", workspace="a\0", **{"scope.read": "on"}
    )
    assert (answer.status_code, "NUL" in answer.text) == (400, True)


async def test_a_token_is_rotated_with_an_overlap_and_revoked(
    app: Application, browser: httpx.AsyncClient
) -> None:
    old = await create_token(app, "ci", "read", expires_s="never")
    path = f"/tokens/{old.split('_')[1]}"
    rotated = await send(browser, f"{path}/rotate", hours="2")
    new = secret_in(rotated)
    assert [await status_of(app, text) for text in (old, new)] == [200, 200]
    assert "It does not expire. The old one is valid until" in rotated.text
    stored = await app.database.durable.fetchrow("select * from api_tokens")
    assert timedelta(hours=1.9) < stored["old_until"] - stored["rotated_at"] <= timedelta(hours=2)
    assert (await send(browser, f"{path}/rotate", hours="many")).status_code == 400
    assert (await browser.post(f"{path}/revoke", data={})).status_code == 403, "no key of a form"
    assert (await send(browser, f"{path}/revoke")).headers["location"] == "/tokens"
    assert [await status_of(app, text) for text in (old, new)] == [401, 401]
    assert "ci" not in (await browser.get("/tokens.json")).text
    assert "revoked" in (await browser.get("/tokens?revoked=true")).text


async def test_a_token_of_a_workspace_sees_its_own_tokens_alone(app: Application) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "sums"})
    await create_token(app, "free", "read")
    bound = await create_token(app, "bound", "admin", workspace="sums")
    weak = await create_token(app, "weak", "control")
    async with signed_in(app, bound) as browser:
        page = (await browser.get("/tokens")).text
        assert '<th scope="row">bound</th>' in page
        assert '<th scope="row">free</th>' not in page
        assert 'name="workspace"' not in page
    async with signed_in(app, weak) as browser:
        assert (await browser.get("/tokens")).status_code == 403
        assert 'href="/tokens"' not in (await browser.get("/sessions")).text
