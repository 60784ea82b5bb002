"""People and their roles: what a person's API key may do, and when it stops working."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from infra.identity import members as members_module
from infra.identity.members import check_role
from infra.identity.people import check_email, check_person_name
from infra.identity.recent_api_keys import RecentApiKeys
from infra.ports.actor import CONTAINED, MAIN, SCOPES, Role
from infra.spine.ports.clock import ManualClock
from schemas.errors import Conflict, InvalidConfig, NotFound
from tests.kit.application import Application
from tests.kit.people import key_of, member
from tests.kit.tenants import ask

pytestmark = pytest.mark.postgres


async def status_of(app: Application, text: str, path: str = "/api/v1/runs") -> int:
    return (await ask(app, "GET", path, text)).status_code


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("viewer", {"read"}),
        ("member", {"read", "submit", "control", "inference"}),
        ("owner", {"read", "submit", "control", "inference", "admin"}),
    ],
)
async def test_an_api_key_of_a_person_may_do_what_its_scopes_and_the_role_allow(
    app: Application, role: Role, allowed: set[str]
) -> None:
    ada = await member(app, "ada", role)
    for scope in SCOPES:
        text = await key_of(app, ada.id, scope, scopes=frozenset({scope}))
        found = await app.services.recent_api_keys.find(text)
        assert found is not None
        held = {part for one in found.effective_scopes for part in CONTAINED[one]}
        assert held - {"metrics"} == CONTAINED[scope] & allowed, scope


async def test_another_role_counts_from_the_next_request_on(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    await member(app, "bea", "owner")
    assert await status_of(app, ada.api_key, "/api/v1/api-keys") == 200
    await app.services.members.change_role(MAIN, ada.id, "viewer")
    assert await status_of(app, ada.api_key, "/api/v1/api-keys") == 403
    assert await status_of(app, ada.api_key) == 200
    await app.services.members.change_role(MAIN, ada.id, "owner")
    assert await status_of(app, ada.api_key, "/api/v1/api-keys") == 200


async def test_no_key_of_an_organisation_reaches_what_is_about_the_installation(
    app: Application,
) -> None:
    ada = await member(app, "ada", "owner")
    for path in ("/api/v1/status", "/api/v1/dead-letters", "/metrics"):
        assert await status_of(app, ada.api_key, path) == 403


async def test_the_keys_of_a_removed_member_are_refused_at_once_and_for_good(
    app: Application,
) -> None:
    await member(app, "owner", "owner")
    ada = await member(app, "ada", "member")
    assert await status_of(app, ada.api_key) == 200
    await app.services.members.remove(MAIN, ada.id)
    answer = await ask(app, "GET", "/api/v1/runs", ada.api_key)
    assert answer.status_code == 401
    assert "ask an owner for an invitation" in answer.text, "ada can make no key"
    await app.services.members.add(MAIN, ada.id, "member", created_by="test")
    assert await status_of(app, ada.api_key) == 401, "a new membership does not open old keys"


async def test_a_key_without_a_member_is_refused_and_says_why(app: Application) -> None:
    """A key that was made while its person was removed: nothing revoked it."""
    ada = await member(app, "ada", "member")
    await app.database.durable.execute("delete from members where person = $1", ada.id)
    app.services.recent_api_keys.forget()
    answer = await ask(app, "GET", "/api/v1/runs", ada.api_key)
    assert answer.status_code == 401
    assert "not a member of its organisation any more" in answer.text


async def test_a_removed_person_is_in_no_organisation_and_its_address_is_free(
    app: Application,
) -> None:
    await member(app, "owner", "owner")
    ada = await member(app, "ada", "viewer")
    await app.services.members.remove_person(ada.id)
    assert await status_of(app, ada.api_key) == 401
    assert await app.services.people.organisations_of(ada.id) == []
    assert (await app.services.people.find(ada.id)).removed_at is not None
    again = await member(app, "ada", "viewer")
    assert again.id != ada.id, "so the new person reaches no personal secrets of the old one"


async def test_another_process_learns_of_each_change_of_members(app: Application) -> None:
    """Each change gives the table another mark, also one that is committed after a later one."""
    ada, clock = await member(app, "ada", "owner"), ManualClock()
    await member(app, "bea", "owner")
    other = RecentApiKeys(app.services.api_keys, clock)
    seen = {await app.services.api_keys.mark()}
    for role in ("member", "viewer", "owner"):
        await app.services.members.change_role(MAIN, ada.id, role)
        seen.add(await app.services.api_keys.mark())
    await app.database.durable.execute(
        "update members set role = 'viewer', changed_at = changed_at - interval '1 h' where person = $1",
        ada.id,
    )
    seen.add(await app.services.api_keys.mark())
    assert len(seen) == 5
    found = await other.find(ada.api_key)
    assert found is not None
    assert found.role == "viewer"
    await app.services.members.remove(MAIN, ada.id)
    clock.advance(5.0)
    found = await other.find(ada.api_key)
    assert found is not None
    assert not found.is_valid(clock.now())


async def test_the_last_owner_can_neither_leave_nor_lose_the_role(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    await member(app, "bea", "member")
    for attempt in (
        app.services.members.remove(MAIN, ada.id),
        app.services.members.change_role(MAIN, ada.id, "member"),
        app.services.members.remove_person(ada.id),
    ):
        with pytest.raises(Conflict, match="the last owner"):
            await attempt
    assert await status_of(app, ada.api_key, "/api/v1/api-keys") == 200
    await app.services.members.change_role(MAIN, ada.id, "owner")


async def owners_after_both_leave(app: Application, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many owners there are after two who were the only ones left at the same time. Each waits for
    the other after it has looked for other owners."""
    ada, bea = await member(app, "ada", "owner"), await member(app, "bea", "owner")
    check, looked = members_module._check_other_owner, [asyncio.Event(), asyncio.Event()]

    async def check_and_wait(connection: Any, organisation: str, person: str) -> None:
        await check(connection, organisation, person)
        looked[person == bea.id].set()
        with suppress(TimeoutError):
            await asyncio.wait_for(looked[person != bea.id].wait(), 0.5)

    monkeypatch.setattr(members_module, "_check_other_owner", check_and_wait)
    members = app.services.members
    await asyncio.gather(
        members.remove(MAIN, ada.id), members.remove(MAIN, bea.id), return_exceptions=True
    )
    found, _ = await members.page(MAIN, limit=10, offset=0)
    return sum(one.role == "owner" for one in found)


async def test_of_two_owners_who_leave_at_once_one_stays(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await owners_after_both_leave(app, monkeypatch) == 1


async def test_without_the_lock_both_owners_would_leave(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlocked:
        def __getitem__(self, name: str) -> str:
            return "select $1::text" if name == "lock_organisation" else queries[name]

    queries = members_module.SQL
    monkeypatch.setattr(members_module, "SQL", Unlocked())
    assert await owners_after_both_leave(app, monkeypatch) == 0


async def test_members_are_found_by_id_address_and_name(app: Application) -> None:
    ada = await member(app, "ada", "viewer")
    for ref in (ada.id, "ADA@example.org", "ada"):
        assert (await app.services.members.find(MAIN, ref)).person.id == ada.id
    with pytest.raises(NotFound, match="headrace member list"):
        await app.services.members.find("other", ada.id)


async def test_two_people_cannot_have_one_address(app: Application) -> None:
    await app.services.people.add("Ada", "ada@example.org", created_by="test")
    with pytest.raises(Conflict, match="there is a person with the address"):
        await app.services.people.add("Other", "ADA@example.org", created_by="test")


def test_names_addresses_and_roles_that_cannot_be_one_are_refused() -> None:
    for name in ("", "  ", "a" * 101, "a\u202eb", "a\x00b"):
        with pytest.raises(InvalidConfig, match="name must be"):
            check_person_name(name)
    for email in ("", "ada", "ada@", "@x.org", "a b@x.org", "a@x.org\nb", f"{'a' * 65}@x.org"):
        with pytest.raises(InvalidConfig, match="email must be"):
            check_email(email)
    with pytest.raises(InvalidConfig, match="is not a role; choose from owner, member, viewer"):
        check_role("admin")
    assert check_person_name("  Ada   Lovelace ") == "Ada Lovelace"
