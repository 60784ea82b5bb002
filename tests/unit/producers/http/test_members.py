"""Members and invitations through the API: who may see and change them, and what an invitation gives."""

import asyncio
from typing import Any

import httpx
import pytest

from infra.identity import invitations
from infra.ports.actor import MAIN, ApiKeyScope
from schemas.errors import Conflict, InvalidConfig, NotFound, Refused
from tests.kit.application import Application
from tests.kit.people import key_of, member
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres

MEMBERS = "/api/v1/organisations/main/members"
INVITATIONS = "/api/v1/organisations/main/invitations"


async def invite(app: Application, api_key: str, **body: Any) -> Any:
    answer = await ask(app, "POST", INVITATIONS, api_key, json=body)
    assert answer.status_code == 201, answer.text
    assert answer.json()["organisation"] == "main"
    return answer.json()


def code_of(made: Any) -> str:
    return str(made["url"]).partition("/join?code=")[2]


async def other_organisation(app: Application) -> str:
    await app.database.durable.execute(
        "insert into organisations (id, name, title, created_by) values ('o2', 'other', 'Other', 't')"
    )
    return "o2"


async def test_each_role_sees_the_members_and_only_owners_change_them(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    people = {role: await member(app, role, role) for role in ("member", "viewer")}
    for who in (ada, *people.values()):
        listed = (await ask(app, "GET", MEMBERS, who.api_key)).json()
        assert [one["role"] for one in listed["members"]] == ["owner", "member", "viewer"]
    for who in people.values():
        for method, path, body in (
            ("PUT", f"{MEMBERS}/{ada.id}", {"role": "viewer"}),
            ("DELETE", f"{MEMBERS}/{ada.id}", None),
            ("GET", INVITATIONS, None),
            ("POST", INVITATIONS, {"role": "owner"}),
        ):
            answer = await ask(app, method, path, who.api_key, json=body)
            assert answer.status_code == 403, (method, path)
    changed = await ask(
        app, "PUT", f"{MEMBERS}/viewer@example.org", ada.api_key, json={"role": "member"}
    )
    assert changed.json()["member"]["role"] == "member"


async def test_another_organisation_is_absent(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    other = await other_organisation(app)
    bea = await member(app, "bea", "owner", organisation=other)
    made = await invite(app, ada.api_key, role="viewer")
    absent = await ask(app, "GET", "/api/v1/organisations/nothing/members", bea.api_key)
    assert absent.status_code == 404
    for method, path in (
        ("GET", MEMBERS),
        ("DELETE", f"{MEMBERS}/{ada.id}"),
        ("GET", INVITATIONS),
        ("DELETE", f"{INVITATIONS}/{made['invitation']['id']}"),
    ):
        answer = await ask(app, method, path, bea.api_key)
        assert answer.status_code == 404
        assert answer.text.replace("'main'", "'nothing'") == absent.text
    own = await ask(app, "GET", "/api/v1/organisations/other/members", bea.api_key)
    assert [one["name"] for one in own.json()["members"]] == ["bea"]
    foreign = await ask(app, "DELETE", f"/api/v1/organisations/other/members/{ada.id}", bea.api_key)
    assert foreign.status_code == 404


async def test_a_key_of_a_workspace_reaches_no_members(app: Application) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    text = await create_api_key(app, "bound", "read")
    assert (await ask(app, "GET", MEMBERS, text)).status_code == 200
    await app.database.durable.execute("update api_keys set workspace = 'w' where name = 'bound'")
    app.services.recent_api_keys.forget()
    assert (await ask(app, "GET", MEMBERS, text)).status_code == 403


async def test_a_member_may_leave_but_the_last_owner_may_not(app: Application) -> None:
    ada, bea = await member(app, "ada", "owner"), await member(app, "bea", "viewer")
    left = await ask(app, "DELETE", f"{MEMBERS}/{bea.id}", bea.api_key)
    assert left.json()["removed"] == bea.id
    assert (await ask(app, "GET", MEMBERS, bea.api_key)).status_code == 401
    refused = await ask(app, "DELETE", f"{MEMBERS}/{ada.id}", ada.api_key)
    assert refused.status_code == 409
    assert "make another member an owner first" in refused.text


async def test_an_api_key_that_was_made_for_less_does_not_end_the_membership(
    app: Application,
) -> None:
    """A reading key in a CI would otherwise end all keys of its person."""
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "member")
    less: list[frozenset[ApiKeyScope]] = [
        frozenset({"read"}),
        frozenset({"submit"}),
        frozenset({"control", "inference"}),
    ]
    for scopes in less:
        text = await key_of(app, bea.id, "-".join(sorted(scopes)), scopes=scopes)
        refused = await ask(app, "DELETE", f"{MEMBERS}/{bea.id}", text)
        assert refused.status_code == 403, scopes
        assert "leaving needs an API key with all that the role member allows" in refused.text
    left = await ask(app, "DELETE", f"{MEMBERS}/{bea.id}", bea.api_key)
    assert left.status_code == 200


async def test_an_invitation_makes_one_member_with_a_first_key(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    made = await invite(app, ada.api_key, role="member")
    attempts = [
        app.services.invitations.accept(code_of(made), name, f"{name}@example.org")
        for name in ("bea", "cleo")
    ]
    results = await asyncio.gather(*attempts, return_exceptions=True)
    welcomed = [one for one in results if not isinstance(one, BaseException)]
    assert len(welcomed) == 1, "it works once"
    assert any(isinstance(one, NotFound) for one in results)
    who = (await ask(app, "GET", "/api/v1/whoami", welcomed[0].secret)).json()
    assert (who["role"], who["organisation"]) == ("member", MAIN)
    assert "admin" not in who["api_key"]["scopes"]
    assert (await ask(app, "GET", INVITATIONS, ada.api_key)).json()["invitations"] == []
    people = (await app.get("/people"))["people"]
    assert len(people) == 2, "the other one was not made"


async def test_without_the_use_of_the_code_an_invitation_would_work_twice(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        def __getitem__(self, name: str) -> str:
            if name != "take_invitation":
                return queries[name]
            columns = "id, organisation, role, email, created_at, created_by, expires_at"
            return f"select {columns} from invitations where sha256 = $1"

    queries = invitations.SQL
    monkeypatch.setattr(invitations, "SQL", Kept())
    ada = await member(app, "ada", "owner")
    made = await invite(app, ada.api_key, role="member")
    await app.services.invitations.accept(code_of(made), "bea", "bea@example.org")
    await app.services.invitations.accept(code_of(made), "cleo", "cleo@example.org")


async def test_an_invitation_to_an_address_is_for_that_address(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    made = await invite(app, ada.api_key, role="viewer", email="Bea@example.org")
    with pytest.raises(InvalidConfig, match="the address to which the invitation was made"):
        await app.services.invitations.accept(code_of(made), "mal", "mal@example.org")
    welcome = await app.services.invitations.accept(code_of(made), "Bea", "bea@example.org")
    assert welcome.person.name == "Bea"


async def test_a_person_joins_a_second_organisation_with_a_key_of_its_own(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    other = await other_organisation(app)
    bea = await member(app, "bea", "owner", organisation=other)
    made = await invite(app, ada.api_key, role="viewer")
    welcome = await app.services.invitations.accept_as(code_of(made), bea.id)
    who = (await ask(app, "GET", "/api/v1/whoami", welcome.secret)).json()
    assert (who["person"]["id"], who["organisation"], who["role"]) == (bea.id, MAIN, "viewer")
    own = (await ask(app, "GET", "/api/v1/whoami", bea.api_key)).json()
    assert (own["organisation"], own["role"]) == (other, "owner")
    await app.services.members.remove(MAIN, bea.id)
    statuses = [
        (await ask(app, "GET", "/api/v1/runs", text)).status_code
        for text in (welcome.secret, bea.api_key)
    ]
    assert statuses == [401, 200], "only the keys of that organisation end"


@pytest.mark.parametrize("ends", ["revoked", "expired", "demoted", "removed"])
async def test_an_invitation_ends(app: Application, ends: str) -> None:
    """Also with the owner who made it, who would otherwise come back by it."""
    ada, bea = await member(app, "ada", "owner"), await member(app, "bea", "owner")
    made = await invite(app, bea.api_key, role="owner")
    if ends == "revoked":
        path = f"{INVITATIONS}/{made['invitation']['id']}"
        assert (await ask(app, "DELETE", path, ada.api_key)).status_code == 200
    elif ends == "expired":
        await app.database.durable.execute("update invitations set expires_at = now()")
    elif ends == "demoted":
        await app.services.members.change_role(MAIN, bea.id, "member")
    else:
        await app.services.members.remove(MAIN, bea.id)
    with pytest.raises(NotFound, match="ask for another"):
        await app.services.invitations.accept(code_of(made), "mal", "mal@example.org")


async def test_a_failed_acceptance_leaves_the_invitation_open(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    made = await invite(app, ada.api_key, role="viewer")
    for name, email in (("", "x@example.org"), ("Eve", "no"), ("Eve", ada.email)):
        with pytest.raises(Refused):
            await app.services.invitations.accept(code_of(made), name, email)
    with pytest.raises(Conflict, match="is a member already"):
        await app.services.invitations.accept_as(code_of(made), ada.id)
    assert await app.services.invitations.find(code_of(made)) is not None


@pytest.mark.parametrize(
    "body",
    [{}, {"role": "admin"}, {"role": "member", "email": "no"}, {"role": 3}, {"role": "x", "o": 1}],
)
async def test_an_invitation_that_makes_no_sense_is_refused(app: Application, body: Any) -> None:
    ada = await member(app, "ada", "owner")
    answer = await ask(app, "POST", INVITATIONS, ada.api_key, json=body)
    assert answer.status_code == 400


async def test_the_operator_lists_and_removes_people(app: Application) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "member")
    assert [one["name"] for one in (await app.get("/people"))["people"]] == ["ada", "bea"]
    removed: httpx.Response = await app.api.delete("/api/v1/people/bea@example.org")
    assert removed.json() == {"removed": bea.id, "name": "bea"}
    assert [one["name"] for one in (await app.get("/people"))["people"]] == ["ada"]
    everyone = (await app.get("/people", removed="true"))["people"]
    assert [one["removed_at"] is None for one in everyone] == [True, False]
