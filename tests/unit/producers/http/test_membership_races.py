"""Removals of members at the same time as what they make or join: whatever comes first, nothing of a
removed member stays, and nobody waits for the other in a circle."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infra.identity.api_key_format import digest
from infra.identity.device_logins import DeviceLoginStore
from infra.identity.issuing import WantedApiKey
from infra.identity.members import remove_member
from infra.identity.people import SQL
from infra.ports.actor import MAIN, Actor
from producers.http.credentials import Credentials
from schemas.errors import Conflict, NotFound
from tests.kit.application import Application
from tests.kit.people import SignedUp, member
from tests.kit.tenants import ask

pytestmark = pytest.mark.postgres

Work = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def half_done(app: Application) -> AsyncIterator[Any]:
    """A connection with an open transaction, which is committed at the end of the block."""
    async with app.database.durable.acquire() as connection, connection.transaction():
        yield connection


async def begin_and_wait(app: Application, work: Work) -> "asyncio.Future[Any]":
    """Begin work that waits for a lock, or ends without one."""
    begun = asyncio.ensure_future(work())
    query = "select count(*) from pg_locks where not granted"
    for _ in range(300):
        if begun.done() or await app.database.lazy.fetchval(query):
            return begun
        await asyncio.sleep(0.01)
    raise AssertionError("the work neither waits nor ends")


async def outcome(work: "asyncio.Future[Any]") -> Any:
    return (await asyncio.gather(work, return_exceptions=True))[0]


async def actor_of(app: Application, person: SignedUp) -> Actor:
    found = await Credentials(app.services).actor_with(person.api_key, "192.0.2.1")
    assert isinstance(found, Actor)
    return found


async def test_an_invitation_ends_with_its_owner_also_when_it_is_used_at_that_moment(
    app: Application,
) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "owner")
    invitations = app.services.invitations
    _, code = await invitations.invite(MAIN, "owner", None, await actor_of(app, bea))
    async with half_done(app) as removing:
        await removing.execute(SQL["lock_organisation"], MAIN)
        using = await begin_and_wait(app, lambda: invitations.accept(code, "Mal", "m@example.org"))
        await remove_member(removing, MAIN, bea.id)
    assert isinstance(await outcome(using), NotFound)
    assert [
        one.person.name for one in (await app.services.members.page(MAIN, limit=9, offset=0))[0]
    ] == ["ada"]


async def test_an_api_key_that_is_made_during_the_removal_is_not_valid_later(
    app: Application,
) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "owner")
    actor, issuer = await actor_of(app, bea), app.services.api_key_issuer
    async with half_done(app) as removing:
        await removing.execute(SQL["lock_organisation"], MAIN)
        await remove_member(removing, MAIN, bea.id)
        wanted = WantedApiKey("late", ["read"])
        making = await begin_and_wait(app, lambda: issuer.create(wanted, actor))
    assert isinstance(await outcome(making), Conflict)
    await app.services.members.add(MAIN, bea.id, "viewer", created_by="test")
    query = "select count(*) from api_keys where person = $1 and revoked_at is null"
    assert await app.database.durable.fetchval(query, bea.id) == 0


async def test_a_login_that_becomes_a_key_during_the_removal_leaves_no_key(
    app: Application,
) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "member")
    logins = app.services.device_logins
    begun = await logins.begin("laptop", "192.0.2.1")
    await logins.approve(begun.user_code, await actor_of(app, bea))
    async with half_done(app) as redeeming:
        row = await redeeming.fetchrow(SQL["take_device_login"], digest(begun.device_code))
        removing = await begin_and_wait(app, lambda: app.services.members.remove(MAIN, bea.id))
        await DeviceLoginStore(app.database)._make_key(redeeming, row)
    assert await outcome(removing) is None
    await app.services.members.add(MAIN, bea.id, "member", created_by="test")
    query = "select count(*) from api_keys where person = $1 and revoked_at is null"
    assert await app.database.durable.fetchval(query, bea.id) == 0


@pytest.mark.parametrize("ends", ["removed", "demoted"])
async def test_an_owner_who_ends_makes_no_invitation_at_that_moment(
    app: Application, ends: str
) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "owner")
    actor, invitations = await actor_of(app, bea), app.services.invitations
    async with half_done(app) as ending:
        await ending.execute(SQL["lock_organisation"], MAIN)
        if ends == "removed":
            await remove_member(ending, MAIN, bea.id)
        else:
            await ending.execute(SQL["set_role"], MAIN, bea.id, "member")
        inviting = await begin_and_wait(app, lambda: invitations.invite(MAIN, "owner", None, actor))
    assert isinstance(await outcome(inviting), Conflict)
    assert await invitations.list_open(MAIN) == []


async def test_an_invitation_that_is_made_first_ends_with_the_demotion(app: Application) -> None:
    await member(app, "ada", "owner")
    bea = await member(app, "bea", "owner")
    async with half_done(app) as inviting:
        await inviting.fetch(SQL["keep_membership"], MAIN, bea.id)
        demoting = await begin_and_wait(
            app, lambda: app.services.members.change_role(MAIN, bea.id, "member")
        )
        await inviting.execute(
            "insert into invitations (id, sha256, organisation, role, created_by, inviter, expires_at)"
            " values ('i', 'x', $1, 'owner', 'bea', $2, now() + interval '1 day')",
            MAIN,
            bea.id,
        )
    assert await outcome(demoting) is None
    assert await app.services.invitations.list_open(MAIN) == []


async def test_a_person_who_is_removed_joins_nothing_at_that_moment(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    await app.database.durable.execute(
        "insert into organisations (id, name, title, created_by) values ('o2', 'other', 'Other', 't')"
    )
    await member(app, "cleo", "owner", organisation="o2")
    bea = await member(app, "bea", "viewer", organisation="o2")
    invitations = app.services.invitations
    _, code = await invitations.invite(MAIN, "member", None, await actor_of(app, ada))
    async with half_done(app) as joining:
        await joining.fetch(SQL["lock_person"], bea.id)
        removing = await begin_and_wait(app, lambda: app.services.members.remove_person(bea.id))
        await joining.execute(SQL["insert_member"], MAIN, bea.id, "member", "test")
    assert await outcome(removing) is None
    assert await app.services.people.organisations_of(bea.id) == []
    with pytest.raises(NotFound, match="there is no person"):
        await invitations.accept_as(code, bea.id)


async def test_many_removals_and_joins_at_once_all_end(app: Application) -> None:
    """Ten owners each invite somebody, and are removed while the links are used."""
    ada = await member(app, "ada", "owner")
    invitations, members = app.services.invitations, app.services.members
    owners = [await member(app, f"owner{number}", "owner") for number in range(10)]
    links = []
    for owner in owners:
        links.append((await invitations.invite(MAIN, "owner", None, await actor_of(app, owner)))[1])
    works: list[Awaitable[Any]] = [members.remove(MAIN, owner.id) for owner in owners]
    works += [
        invitations.accept(code, f"Mal{number}", f"mal{number}@example.org")
        for number, code in enumerate(links)
    ]
    answers = await asyncio.gather(*works, return_exceptions=True)
    assert {type(one) for one in answers if isinstance(one, Exception)} <= {NotFound}, answers
    assert (await ask(app, "GET", "/api/v1/whoami", ada.api_key)).json()["role"] == "owner"
