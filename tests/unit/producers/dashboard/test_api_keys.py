"""The page of API keys: it lists, makes, rotates and revokes them, and shows a secret once."""

from datetime import timedelta

import httpx
import pytest

from tests.kit.application import Application
from tests.kit.signed_in import form_key_in, signed_in
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres


async def send(browser: httpx.AsyncClient, path: str, **fields: str) -> httpx.Response:
    key = form_key_in((await browser.get("/api-keys")).text)
    return await browser.post(path, data={"form_key": key, **fields})


def secret_in(page: httpx.Response) -> str:
    return page.text.partition('<pre tabindex="0">')[2].partition("</pre>")[0]


async def status_of(app: Application, api_key: str) -> int:
    return (await ask(app, "GET", "/api/v1/runs", api_key)).status_code


async def test_an_api_key_is_made_with_its_secret_shown_once(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "sums"})
    fields = {"name": "ci", "workspace": "sums", "days": "30", "scope.submit": "on"}
    made = await send(browser, "/api-keys", **fields)
    assert made.status_code == 200, made.text
    assert await status_of(app, secret_in(made)) == 200
    page = (await browser.get("/api-keys")).text
    assert secret_in(made) not in page
    row = page.partition('<th scope="row">ci</th>')[2].partition("</tr>")[0]
    assert all(text in row for text in (">sums</a>", "submit", "admin"))
    [api_key] = (await browser.get("/api-keys.json")).json()["api_keys"]
    assert api_key["scopes"] == ["submit"]
    stored = await app.database.durable.fetchrow("select * from api_keys")
    assert stored["expires_at"] - stored["created_at"] > timedelta(days=29.99)
    forever = await send(
        browser, "/api-keys", name="old", days="30", never="on", **{"scope.read": "on"}
    )
    assert "It does not expire." in forever.text


async def test_the_address_of_a_former_release_leads_to_the_page(
    browser: httpx.AsyncClient,
) -> None:
    answer = await browser.get("/tokens", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (308, "/api-keys")


async def test_a_refused_form_says_why_and_keeps_what_was_written(
    browser: httpx.AsyncClient,
) -> None:
    wrong = (
        ({"name": "a b", "days": "9", "scope.read": "on"}, 400, "name"),
        ({"name": "ok", "days": "0", "scope.read": "on"}, 400, "a whole number from 1 to 3650"),
        ({"name": "ok", "days": "9"}, 400, "an API key needs a scope"),
        ({"name": "ok", "days": "9", "scope.read": "on", "workspace": "no"}, 404, "no"),
    )
    for fields, status, says in wrong:
        answer = await send(browser, "/api-keys", **fields)
        assert answer.status_code == status
        problem = answer.text.partition('role="alert"')[2].partition("</div>")[0]
        assert says in problem
        assert f'value="{fields["name"]}"' in answer.text
    assert (await browser.get("/api-keys.json")).json()["api_keys"] == []


async def test_a_form_with_a_nul_is_refused_as_an_address_is(browser: httpx.AsyncClient) -> None:
    """The database takes none."""
    answer = await send(
        browser, "/api-keys", name="ok", days="9", workspace="a\0", **{"scope.read": "on"}
    )
    assert (answer.status_code, "NUL" in answer.text) == (400, True)


async def test_an_api_key_is_rotated_with_an_overlap_and_revoked(
    app: Application, browser: httpx.AsyncClient
) -> None:
    old = await create_api_key(app, "ci", "read", expires_s="never")
    path = f"/api-keys/{old.split('_')[1]}"
    rotated = await send(browser, f"{path}/rotate", hours="2")
    new = secret_in(rotated)
    assert [await status_of(app, text) for text in (old, new)] == [200, 200]
    assert "It does not expire. The old one is valid until" in rotated.text
    stored = await app.database.durable.fetchrow("select * from api_keys")
    assert timedelta(hours=1.9) < stored["old_until"] - stored["rotated_at"] <= timedelta(hours=2)
    assert (await send(browser, f"{path}/rotate", hours="many")).status_code == 400
    assert (await browser.post(f"{path}/revoke", data={})).status_code == 403, "no key of a form"
    assert (await send(browser, f"{path}/revoke")).headers["location"] == "/api-keys"
    assert [await status_of(app, text) for text in (old, new)] == [401, 401]
    assert "ci" not in (await browser.get("/api-keys.json")).text
    assert "revoked" in (await browser.get("/api-keys?revoked=true")).text


async def test_an_api_key_of_a_workspace_sees_its_own_api_keys_alone(app: Application) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "sums"})
    await create_api_key(app, "free", "read")
    bound = await create_api_key(app, "bound", "admin", workspace="sums")
    weak = await create_api_key(app, "weak", "control")
    async with signed_in(app, bound) as browser:
        page = (await browser.get("/api-keys")).text
        assert '<th scope="row">bound</th>' in page
        assert '<th scope="row">free</th>' not in page
        assert 'name="workspace"' not in page
    async with signed_in(app, weak) as browser:
        assert (await browser.get("/api-keys")).status_code == 403
        assert 'href="/api-keys"' not in (await browser.get("/sessions")).text
