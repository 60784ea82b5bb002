"""The credentials that a request may carry: which are read where, and which are refused together."""

from dataclasses import dataclass, replace

import httpx
import pytest

from infra.http.failed_auth_throttle import REFUSED_AT_ONCE
from infra.identity.sessions import Bearer
from producers.http.app import create_app
from producers.http.browsers import COOKIE
from producers.http.credentials import LONGEST_HEADER, root_actor
from schemas.errors import Refused
from tests.kit.application import API_KEY, Application
from tests.kit.people import member
from tests.kit.tenants import create_api_key

pytestmark = pytest.mark.postgres

PEER = ("192.0.2.9", 4000)


class Expired(Refused):
    code = "SIGNED_URL"
    status = 403


@dataclass
class Signatures:
    """Signed URLs whose signature is the id of the API key that asked for them."""

    @dataclass
    class Grant:
        api_key: str

    async def read(self, method: str, path: str, query: str) -> Grant:
        if not query.startswith("signature="):
            raise Expired("the URL has expired")
        return self.Grant(query.removeprefix("signature="))


def client_of(app: Application, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False, client=PEER)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.AsyncClient(transport=transport, base_url=str(app.api.base_url), headers=named)


async def ask(app: Application, path: str, **headers: str) -> httpx.Response:
    async with client_of(app, **headers) as client:
        return await client.get(path)


async def test_x_api_key_is_read_below_api_v1_with_the_same_rights(app: Application) -> None:
    ada = await member(app, "ada", "viewer")
    reader = await create_api_key(app, "reader", "read")
    for text in (API_KEY, reader, ada.api_key):
        assert (await ask(app, "/api/v1/runs", X_API_Key=text)).status_code == 200
    assert (await ask(app, "/api/v1/api-keys", X_API_Key=API_KEY)).status_code == 200
    assert (await ask(app, "/api/v1/api-keys", X_API_Key=reader)).status_code == 403
    for path in ("/v1/models", "/metrics", "/"):
        answer = await ask(app, path, X_API_Key=API_KEY)
        assert answer.status_code in (401, 303), "it is not read there"


async def test_requests_with_x_api_key_are_in_the_audit_list_and_their_links_open_sessions(
    app: Application,
) -> None:
    ada = await member(app, "ada", "viewer")
    async with client_of(app, X_API_Key=ada.api_key) as client:
        made = await client.post("/api/v1/login-links", json={})
    assert made.status_code == 201
    code = made.json()["url"].partition("code=")[2]
    bearer = await app.services.sessions.redeem_code(code)
    assert bearer is not None
    assert ada.api_key.split("_")[1] == bearer.api_key
    entries = (await app.get("/audit", api_key=ada.id))["audit"]
    assert {one["subject"] for one in entries} >= {"/api/v1/login-links"}


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (
            [("authorization", f"Bearer {API_KEY}"), ("x-api-key", API_KEY)],
            400,
            "SEVERAL_CREDENTIALS",
        ),
        ([("authorization", f"Bearer {API_KEY}")] * 2, 400, "SEVERAL_CREDENTIALS"),
        ([("x-api-key", API_KEY)] * 2, 400, "SEVERAL_CREDENTIALS"),
        ([("x-api-key", "k" * (LONGEST_HEADER + 1))], 431, "CREDENTIAL_TOO_LONG"),
        ([("authorization", "Bearer " + "k" * LONGEST_HEADER)], 431, "CREDENTIAL_TOO_LONG"),
        ([("authorization", API_KEY)], 401, "UNAUTHORIZED"),
        ([("authorization", "Basic YTpi")], 401, "UNAUTHORIZED"),
        ([("authorization", "Bearer")], 401, "UNAUTHORIZED"),
        ([("authorization", "Bearer \u00e9\u00ff")], 401, "UNAUTHORIZED"),
        ([("x-api-key", "")], 401, "UNAUTHORIZED"),
        ([("x-api-key", f"Bearer {API_KEY}")], 401, "UNAUTHORIZED"),
        ([], 401, "UNAUTHORIZED"),
    ],
)
async def test_confused_credentials_are_refused_and_count_as_a_strangers(
    app: Application, headers: list[tuple[str, str]], status: int, code: str
) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    transport = httpx.ASGITransport(app.app, client=PEER)
    base = str(app.api.base_url)
    async with httpx.AsyncClient(transport=transport, base_url=base, headers=raw) as client:
        for _ in range(int(REFUSED_AT_ONCE) + 20):
            answer = await client.get("/api/v1/runs")
    assert answer.status_code == status
    assert answer.json()["code"] == code
    assert answer.headers["connection"] == "close"
    assert app.services.throttle.must_leave(PEER[0])


async def test_a_header_at_a_page_counts_before_the_cookie(app: Application) -> None:
    ada, reader = await member(app, "ada", "owner"), await create_api_key(app, "reader", "read")
    made = await app.services.recent_api_keys.find(ada.api_key)
    assert made is not None
    cookie = await app.services.sessions.open(Bearer(made.id, made.sha256))
    headers = {"Cookie": f"{COOKIE}={cookie}"}
    assert (await ask(app, "/api-keys", **headers)).status_code == 200
    both = await ask(app, "/api-keys", Authorization=f"Bearer {reader}", **headers)
    assert both.status_code == 403
    assert (await ask(app, "/api/v1/runs", **headers)).status_code == 401, "pages only"


@pytest.fixture
def signed(app: Application) -> Application:
    """The application with signed URLs."""
    services = replace(app.services)
    services.__dict__["signed_urls"] = Signatures()
    return replace(app, services=services, app=create_app(services))


async def test_a_signed_url_needs_no_header_and_has_one_right_of_its_key(
    signed: Application,
) -> None:
    text = await create_api_key(signed, "reader", "read")
    identity = text.split("_")[1]
    path = f"/api/v1/transfers/x?signature={identity}"
    assert (await ask(signed, path)).status_code == 404, "the guard let it through"
    async with client_of(signed) as client:
        assert (await client.put(path)).status_code == 403, "the key may not submit"
    both = await ask(signed, path, Authorization=f"Bearer {text}")
    assert (both.status_code, both.json()["code"]) == (400, "SEVERAL_CREDENTIALS")
    await signed.services.api_key_issuer.revoke(identity, root_actor(""))
    assert (await ask(signed, path)).json()["code"] == "SIGNED_URL"
    elsewhere = await ask(signed, f"/api/v1/runs?signature={identity}")
    assert elsewhere.status_code == 401


async def test_signed_urls_never_count_as_a_strangers(signed: Application) -> None:
    for _ in range(int(REFUSED_AT_ONCE) + 20):
        assert (await ask(signed, "/api/v1/transfers/x?old=1")).status_code == 403
    assert not signed.services.throttle.must_leave(PEER[0])
    for _ in range(int(REFUSED_AT_ONCE) + 20):
        assert (await ask(signed, "/api/v1/runs?old=1")).status_code == 401
    assert signed.services.throttle.must_leave(PEER[0]), "the twin without a signed URL counts"
