"""The pages of people: members and invitations, the link of an invitation, and the approval of a device
login."""

import re

import httpx
import pytest

from infra.ports.actor import MAIN
from tests.kit.application import Application
from tests.kit.people import SignedUp, member
from tests.kit.signed_in import HERE, form_key_in, signed_in
from tests.kit.tenants import ask

pytestmark = pytest.mark.postgres


def shown_in(page: httpx.Response) -> str:
    return page.text.partition('<pre tabindex="0">')[2].partition("</pre>")[0]


async def begin(app: Application) -> tuple[str, str]:
    """The device code and the user code of a new login."""
    begun = await app.services.device_logins.begin("<b>laptop</b>", "192.0.2.7")
    return begun.device_code, begun.user_code


async def poll_status(app: Application, device_code: str) -> str:
    await app.database.durable.execute("update device_logins set polled_at = null")
    answer = await app.api.post("/api/v1/device/token", json={"device_code": device_code})
    return "issued" if answer.status_code == 200 else str(answer.json()["code"])


async def test_a_person_sees_the_device_and_approves_it(app: Application) -> None:
    ada = await member(app, "ada", "viewer")
    device_code, user_code = await begin(app)
    async with signed_in(app, ada.api_key) as browser:
        page = await browser.get("/device", params={"code": user_code})
        assert "&lt;b&gt;laptop&lt;/b&gt;" in page.text
        assert "192.0.2.7" in page.text
        assert shown_in(page) == user_code
        assert await poll_status(app, device_code) == "AUTHORIZATION_PENDING", (
            "opening approves nothing"
        )
        form = {"form_key": form_key_in(page.text), "code": user_code}
        done = await browser.post("/device", data={**form, "decision": "approve"})
        assert "is signed in" in done.text
        again = await browser.post("/device", data={**form, "decision": "approve"})
        assert again.status_code == 404
        assert "no login waits under this code" in again.text
    assert await poll_status(app, device_code) == "issued"


async def test_a_typed_code_is_shown_before_it_is_approved_and_may_be_denied(
    app: Application,
) -> None:
    ada = await member(app, "ada", "member")
    device_code, user_code = await begin(app)
    async with signed_in(app, ada.api_key) as browser:
        key = form_key_in((await browser.get("/device")).text)
        page = await browser.post("/device", data={"form_key": key, "code": user_code.lower()})
        assert "192.0.2.7" in page.text
        fields = {"form_key": key, "code": user_code, "decision": "deny"}
        assert "was denied" in (await browser.post("/device", data=fields)).text
    assert await poll_status(app, device_code) == "ACCESS_DENIED"


async def test_a_page_of_another_site_approves_nothing(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    device_code, user_code = await begin(app)
    fields = {"code": user_code, "decision": "approve"}
    async with signed_in(app, ada.api_key) as browser:
        key = form_key_in((await browser.get("/device")).text)
        foreign = await browser.post(
            "/device", data={**fields, "form_key": key}, headers={"Origin": "http://evil.test"}
        )
        assert foreign.status_code == 403
        assert (await browser.post("/device", data=fields)).status_code == 403, "no form key"
    assert await poll_status(app, device_code) == "AUTHORIZATION_PENDING"


async def test_a_reader_without_a_session_signs_in_first_and_comes_back(app: Application) -> None:
    _, user_code = await begin(app)
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(transport=transport, base_url=HERE) as stranger:
        answer = await stranger.get("/device", params={"code": user_code})
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/login?next=/device%3Fcode%3D")


async def test_the_root_key_approves_nothing_and_the_page_says_why(app: Application) -> None:
    _, user_code = await begin(app)
    async with signed_in(app) as browser:
        page = await browser.get("/device", params={"code": user_code})
    assert page.status_code == 403
    assert "belongs to nobody" in page.text


async def test_an_owner_invites_changes_and_removes_on_the_page(app: Application) -> None:
    ada, bea = await member(app, "ada", "owner"), await member(app, "bea", "viewer")
    async with signed_in(app, ada.api_key) as browser:
        key = form_key_in((await browser.get("/members")).text)
        made = await browser.post("/members", data={"form_key": key, "role": "member", "email": ""})
        assert "/join?code=" in shown_in(made)
        page = (await browser.get("/members")).text
        assert "/join?code=" not in page
        role = await browser.post(
            f"/members/{bea.id}/role", data={"form_key": key, "role": "member"}
        )
        assert role.status_code == 303
        assert (await app.services.members.find(MAIN, bea.id)).role == "member"
        refused = await browser.post(
            f"/members/{ada.id}/role", data={"form_key": key, "role": "viewer"}
        )
        assert refused.status_code == 409
        assert "the last owner" in refused.text
        wrong = await browser.post("/members", data={"form_key": key, "role": "x"})
        assert (wrong.status_code, "is not a role" in wrong.text) == (400, True)
        await browser.post(f"/members/{bea.id}/remove", data={"form_key": key})
        [invitation] = await app.services.invitations.list_open(MAIN)
        ended = await browser.post(f"/invitations/{invitation.id}/revoke", data={"form_key": key})
        assert ended.status_code == 303
    assert (await ask(app, "GET", "/api/v1/runs", bea.api_key)).status_code == 401
    assert await app.services.invitations.list_open(MAIN) == []


async def test_a_viewer_sees_the_list_without_buttons_but_to_leave(app: Application) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "viewer")
    async with signed_in(app, bea.api_key) as browser:
        page = (await browser.get("/members")).text
        assert "ada@example.org" in page
        assert "Invite a person" not in page
        assert re.findall(r"<button[^>]*>(Leave|Remove|Change)", page) == ["Leave"]
        assert "(viewer)" in page, "the header says who is signed in"
        who = (await browser.get("/sessions")).text
        assert "bea@example.org" in who


async def join(app: Application, browser: httpx.AsyncClient, owner: SignedUp) -> str:
    """The code of a new invitation, whose page the browser has seen."""
    made = await ask(
        app,
        "POST",
        "/api/v1/organisations/main/invitations",
        owner.api_key,
        json={"role": "member"},
    )
    code = str(made.json()["url"]).partition("code=")[2]
    page = await browser.get("/join", params={"code": code})
    assert page.status_code == 200
    return code


async def test_a_link_makes_a_person_shows_the_key_once_and_signs_in(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as browser:
        code = await join(app, browser, ada)
        fields = {"code": code, "name": "Bea <i>", "email": "bea@example.org"}
        welcome = await browser.post("/join", data=fields)
        assert welcome.status_code == 200
        assert "Bea &lt;i&gt;" in welcome.text
        who = (await ask(app, "GET", "/api/v1/whoami", shown_in(welcome))).json()
        assert (who["person"]["email"], who["role"]) == ("bea@example.org", "member")
        assert (await browser.get("/sessions")).status_code == 200, "the browser is signed in"
        used = await browser.post("/join", data={**fields, "email": "c@example.org"})
        assert used.status_code == 401
        assert "was used or revoked" in used.text


async def test_a_link_that_went_to_somebody_else_does_not_show_the_address_it_needs(
    app: Application,
) -> None:
    ada = await member(app, "ada", "owner")
    path = "/api/v1/organisations/main/invitations"
    body = {"role": "owner", "email": "secret.bea@example.org"}
    made = await ask(app, "POST", path, ada.api_key, json=body)
    code = str(made.json()["url"]).partition("code=")[2]
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(
        transport=transport, base_url=HERE, headers={"Origin": HERE}
    ) as browser:
        page = await browser.get("/join", params={"code": code})
        fields = {"code": code, "name": "Mal", "email": "mal@example.org"}
        refused = await browser.post("/join", data=fields)
    assert (page.status_code, refused.status_code) == (200, 400)
    for answer in (page, refused):
        assert "secret.bea" not in answer.text


async def test_a_person_who_is_signed_in_joins_with_a_button(app: Application) -> None:
    await app.database.durable.execute(
        "insert into organisations (id, name, title, created_by) values ('o2', 'other', 'Other', 't')"
    )
    ada = await member(app, "ada", "owner")
    bea = await member(app, "bea", "viewer", organisation="o2")
    async with signed_in(app, bea.api_key) as browser:
        code = await join(app, browser, ada)
        page = (await browser.get("/join", params={"code": code})).text
        assert "Join as bea" in page
        forged = await browser.post("/join", data={"code": code, "form_key": "0" * 40})
        assert forged.status_code == 403
        fields = {"code": code, "form_key": form_key_in(page)}
        welcome = await browser.post("/join", data=fields)
        assert welcome.status_code == 200, welcome.text
    assert (await app.services.members.find(MAIN, bea.id)).role == "member"


async def test_a_form_of_another_site_uses_no_invitation_up(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    transport = httpx.ASGITransport(app.app)
    async with httpx.AsyncClient(transport=transport, base_url=HERE) as browser:
        code = await join(app, browser, ada)
        fields = {"code": code, "name": "Bea", "email": "bea@example.org"}
        for origin in ({}, {"Origin": "http://evil.test"}):
            answer = await browser.post("/join", data=fields, headers=origin)
            assert answer.status_code == 403
    assert await app.services.invitations.find(code) is not None
