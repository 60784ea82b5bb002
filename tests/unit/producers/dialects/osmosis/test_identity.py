"""Who the client is: keys of people and of nobody, device logins, and keys that end."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from infra.ports.actor import Actor
from producers.dialects.osmosis.client_form import ClientForm
from producers.http.credentials import Credentials
from tests.kit.application import API_KEY, Application
from tests.kit.people import member
from tests.kit.tenants import Tenant, ask, create_api_key

pytestmark = pytest.mark.postgres

OURS = {"X-Osmosis-Git": "acme/ours"}
BASE = "/api/cli"


async def get(app: Application, path: str, key: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await ask(app, "GET", f"{BASE}{path}", key, headers=named)


async def post(app: Application, path: str, body: object) -> httpx.Response:
    """A request without an API key."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=app.api.base_url) as client:
        return await client.post(f"{BASE}{path}", json=body)


async def verified(app: Application, key: str, **headers: str) -> dict[str, Any]:
    answer = await get(app, "/verify", key, **headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_key_of_a_person_shows_the_person_and_the_role(
    app: Application, ours: Tenant
) -> None:
    ada = await member(app, "ada", "viewer")
    found = await verified(app, ada.api_key, X_Osmosis_Git="acme/ours")
    assert found["user"] == {"id": ada.id, "email": "ada@example.org", "name": "ada"}
    assert found["workspace"] == {"id": ours.workspace, "name": "ours", "role": "viewer"}
    assert (await verified(app, ada.api_key))["workspace"] is None


async def test_a_key_of_nobody_has_its_owners_name(app: Application, ours: Tenant) -> None:
    """The client requires all three fields to be filled."""
    expiring = await create_api_key(app, "short", "read", owner="robot", expires_s=3600)
    found = await verified(app, expiring)
    assert found["user"] == {"id": "robot", "email": "robot", "name": "robot"}
    assert datetime.fromisoformat(found["expires_at"]) > datetime.now(UTC)
    root = await verified(app, API_KEY)
    assert (root["token_id"], root["expires_at"]) == (None, None)
    del ours


async def test_a_key_revokes_itself_and_no_other(app: Application) -> None:
    key = await create_api_key(app, "laptop", "metrics")
    other = await verified(app, await create_api_key(app, "other", "read"))
    own = await verified(app, key)
    for ref in (other["token_id"], "root", "laptop", "../verify", "x" * 300):
        answer = await ask(app, "DELETE", f"{BASE}/tokens/{ref}", key)
        assert answer.status_code in (404, 405), answer.text
    gone = await ask(app, "DELETE", f"{BASE}/tokens/{own['token_id']}", key)
    assert (gone.status_code, gone.content) == (204, b"")
    again = await ask(app, "DELETE", f"{BASE}/tokens/{own['token_id']}", key)
    assert (again.status_code, again.json()["code"]) == (401, "TOKEN_REVOKED")
    root = await ask(app, "DELETE", f"{BASE}/tokens/root", API_KEY)
    assert root.status_code == 403
    assert (await get(app, "/verify", API_KEY)).status_code == 200


async def test_a_key_that_has_expired_says_so(app: Application) -> None:
    key = await create_api_key(app, "old", "read", expires_s=3600)
    await app.database.durable.execute(
        "update api_keys set expires_at = $1 where name = 'old'",
        datetime.now(UTC) - timedelta(seconds=1),
    )
    answer = await get(app, "/verify", key)
    assert (answer.status_code, answer.json()["code"]) == (401, "TOKEN_EXPIRED")


async def begin(app: Application, body: object) -> dict[str, Any]:
    answer = await post(app, "/device/authorize", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def polled(app: Application, begun: dict[str, Any]) -> httpx.Response:
    """A poll that is not too soon."""
    await app.database.durable.execute("update device_logins set polled_at = null")
    return await post(app, "/device/token", {"device_code": begun["device_code"]})


async def test_a_device_logs_in_once_a_person_approves(app: Application) -> None:
    ada = await member(app, "ada", "member")
    begun = await begin(app, {"deviceName": "laptop"})
    assert begun["verification_uri_complete"].endswith(f"?code={begun['user_code']}")
    pending = await polled(app, begun)
    assert (pending.status_code, pending.json()["error"]) == (400, "authorization_pending")
    soon = await post(app, "/device/token", {"device_code": begun["device_code"]})
    assert (soon.status_code, soon.json()["error"]) == (400, "slow_down")
    approver = await Credentials(app.services).actor_with(ada.api_key, "192.0.2.1")
    assert isinstance(approver, Actor)
    await app.services.device_logins.approve(begun["user_code"], approver)
    issued = (await polled(app, begun)).json()
    assert issued["user"] == {"id": ada.id, "email": "ada@example.org", "name": "ada"}
    found = await verified(app, issued["token"])
    assert found["token_id"] == issued["token_id"]
    assert found["user"]["id"] == ada.id
    used = await polled(app, begun)
    assert (used.status_code, used.json()["error"]) == (400, "expired_token")


@pytest.mark.parametrize("body", [{}, {"device_code": 7}, {"device_code": "x" * 5000}, [], "x"])
async def test_a_device_code_that_is_none_gets_no_key(app: Application, body: object) -> None:
    answer = await post(app, "/device/token", body)
    assert answer.status_code == 400
    assert answer.json()["error"] == "expired_token" or answer.json()["code"] == "VALIDATION"


async def test_a_client_that_is_too_old_is_asked_to_upgrade(app: Application) -> None:
    """Only where a setting asks for it, and never a newer client."""

    async def status(version: str | None, least: str | None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        headers |= {} if version is None else {"X-Osmosis-CLI-Version": version}
        wrapped = ClientForm(app.app, least_version=least)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(wrapped), base_url=app.api.base_url
        ) as client:
            answer = await client.get(f"{BASE}/verify", headers=headers)
        return answer.status_code, answer.headers["x-osmosis-version-status"]

    for version in (None, "0.0.1", "0.3.8", "99.0.0", "0.4.0rc1", "x", "9" * 5000):
        assert await status(version, None) == (200, "current")
    assert await status("0.3.7", "0.3.8") == (426, "unsupported")
    assert await status("0.3", "0.3.8") == (426, "unsupported")
    assert await status("x", "0.3.8") == (426, "unsupported")
    for version in (None, "0.3.8", "0.3.10", "0.10.0", "1.0", "0.3.8rc1"):
        assert await status(version, "0.3.8") == (200, "current"), version
