"""Signing in with an OpenID Connect provider: who gets a session, and each lie that gets none. A twin of
each protection shows that the lie works without it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc.jwk import ECKey

from infra.identity.oidc import answers
from infra.identity.oidc.answers import ProviderRequests
from infra.identity.oidc.attempts import Attempts, SignInAttempt
from infra.identity.oidc.provider import OidcProvider
from infra.ports.actor import MAIN
from producers.core import device_login
from producers.dashboard.pages.access import oidc as page
from schemas.errors import Conflict
from tests.kit.application import Application, application
from tests.kit.oidc_provider import LyingProvider, Person, account, environment, lying_provider
from tests.kit.people import member
from tests.kit.signed_in import HERE, form_key_in

pytestmark = pytest.mark.postgres

GROUPS = "admins=main:owner,staff=main:member,guests=main:viewer,lakes=lakes:member"


@dataclass
class World:
    """An installation, and its provider."""

    app: Application
    provider: LyingProvider

    @asynccontextmanager
    async def browser(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(
            transport=transport, base_url=HERE, headers={"Origin": HERE}
        ) as client:
            yield client

    async def begin(self, browser: httpx.AsyncClient, following: str = "/") -> str:
        answer = await browser.get("/sign-in/oidc", params={"next": following})
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])

    async def sign_in(
        self, browser: httpx.AsyncClient, person: Person, following: str = "/", **brought: str
    ) -> httpx.Response:
        """The whole way of a browser, which may bring something else back."""
        back = self.provider.back(await self.begin(browser, following), person)
        return await browser.get("/sign-in/oidc/callback", params={**back, **brought})

    async def roles(self, email: str = "ada@example.org") -> dict[str, tuple[str, bool]]:
        found = await self.app.database.durable.fetch(
            "select m.organisation, m.role, m.from_groups from members m "
            "join people p on p.id = m.person where p.email = $1 and p.removed_at is null",
            email,
        )
        return {row["organisation"]: (row["role"], row["from_groups"]) for row in found}

    async def audit(self) -> list[Mapping[str, Any]]:
        entries, _ = await self.app.services.audit.page(
            since=None, api_key=None, workspace=None, limit=100, offset=0
        )
        return [one for one in entries if one["method"] == page.METHOD]


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with (
        lying_provider() as provider,
        application(
            database_url, tmp_path / "home", environ=environment(provider.issuer, GROUPS)
        ) as app,
    ):
        yield World(app, provider)


async def test_a_first_sign_in_makes_the_person_with_the_role_of_the_groups(world: World) -> None:
    async with world.browser() as browser:
        shown = await browser.get("/login?next=/members")
        assert 'href="/sign-in/oidc?next=/members"' in shown.text
        done = await world.sign_in(browser, account("ada", "staff", "guests"), "/members")
        assert (done.status_code, done.headers["location"]) == (303, "/members")
        listed = await browser.get("/members")
        assert "ada@example.org" in listed.text
        assert "member (from groups)" in listed.text
    assert await world.roles() == {MAIN: ("member", True)}
    people, _ = await world.app.services.people.page(removed=False, limit=9, offset=0)
    entries = {one["subject"]: one for one in await world.audit()}
    assert set(entries) == {f"groups made {people[0].id} member", f"{people[0].id} signed in"}
    assert entries[f"{people[0].id} signed in"]["owner"] == people[0].id
    assert {one["organisation"] for one in entries.values()} == {MAIN}


async def test_the_session_is_one_of_a_short_key_and_ends_with_it(world: World) -> None:
    async with world.browser() as browser:
        await world.sign_in(browser, account("ada", "staff"))
        (key,) = (
            await world.app.services.api_keys.page(
                workspace=None, revoked=False, limit=9, offset=0, organisation=MAIN
            )
        )[0]
        assert key.person is not None
        assert key.expires_at is not None
        assert 11.9 < (key.expires_at - key.created_at).total_seconds() / 3600 <= 12
        listed = await browser.get("/sessions")
        assert key.name in listed.text
        left = await browser.post("/logout", data={"form_key": form_key_in(listed.text)})
        assert left.headers["location"] == "/login"
        assert (await browser.get("/sessions")).status_code == 303
    again = await world.app.services.api_keys.find(key.id, workspace=None)
    assert again.revoked_at is not None, "nobody can use it any more"


async def test_memberships_follow_the_groups_and_given_ones_stay(world: World) -> None:
    lakes = await world.app.services.organisations.make("lakes", by="test")
    await member(world.app, "owner", "owner")
    async with world.browser() as browser:
        await world.sign_in(browser, account("ada", "staff", "lakes"))
        assert await world.roles() == {MAIN: ("member", True), lakes.id: ("member", True)}
        await world.sign_in(browser, account("ada", "admins"))
        assert await world.roles() == {MAIN: ("owner", True)}
        await world.sign_in(browser, account("ada", "guests"))
        assert await world.roles() == {MAIN: ("viewer", True)}
        person = await world.app.services.people.find_named("ada@example.org")
        with pytest.raises(Conflict, match="comes from groups"):
            await world.app.services.members.change_role(MAIN, person.id, "owner")
        await world.app.services.members.remove(MAIN, person.id)
        await world.app.services.members.add(MAIN, person.id, "member", created_by="test")
        for groups in (("admins",), ()):
            done = await world.sign_in(browser, account("ada", *groups))
            assert done.status_code == 303
            assert await world.roles() == {MAIN: ("member", False)}, "an owner gave it"


async def test_a_group_that_is_gone_ends_the_membership_and_every_key(world: World) -> None:
    await member(world.app, "owner", "owner")
    async with world.browser() as first, world.browser() as second:
        await world.sign_in(first, account("ada", "staff"))
        assert (await first.get("/")).status_code == 200
        refused = await world.sign_in(second, account("ada"))
        assert refused.status_code == 403
        assert "ask the operator to add you to a group" in refused.text
        assert (await second.get("/")).status_code == 303, "no session"
        assert (await first.get("/")).status_code == 303, "the open one ended"
    assert await world.roles() == {}
    words = [one["subject"] for one in await world.audit()]
    assert any(text.startswith("groups removed ada") for text in words)
    assert any(text.startswith("refused: you are known to") for text in words)
    report = await world.app.services.audit.verify()
    assert [one.broken_at for one in report.values()] == [None, None]
    assert report["changes"].entries >= 3


async def test_the_last_owner_stays_against_the_groups(world: World) -> None:
    async with world.browser() as browser:
        for groups in (("admins",), ("guests",), ()):
            done = await world.sign_in(browser, account("ada", *groups))
            assert done.status_code == 303
            assert await world.roles() == {MAIN: ("owner", True)}


async def test_nothing_is_stored_of_a_stranger_without_a_membership(world: World) -> None:
    async with world.browser() as browser:
        for groups in ((), ("unknown",)):
            assert (await world.sign_in(browser, account("eve", *groups))).status_code == 403
    _, total = await world.app.services.people.page(removed=True, limit=1, offset=0)
    assert total == 0


async def test_an_organisation_that_is_not_there_gives_nothing(world: World) -> None:
    async with world.browser() as browser:
        assert (await world.sign_in(browser, account("ada", "lakes"))).status_code == 403


async def test_a_person_with_the_address_is_linked_only_if_it_is_verified(world: World) -> None:
    ada = await member(world.app, "ada", "viewer")
    async with world.browser() as browser:
        for verified in (None, False):
            refused = await world.sign_in(browser, account("ada", "admins", verified=verified))
            assert refused.status_code == 403
            assert "verified" in refused.text
            assert (await browser.get("/")).status_code == 303
        assert await world.roles() == {MAIN: ("viewer", False)}
        done = await world.sign_in(browser, account("ada", "admins", verified=True))
        assert done.status_code == 303
        assert ada.id in (await browser.get("/sessions")).text
        later = await world.sign_in(browser, account("ada", verified=None))
        assert later.status_code == 303, "the account is known now"
        taken = Person("another-subject", account("ada", "admins").claims)
        refused = await world.sign_in(browser, taken)
        assert refused.status_code == 403, "an address that somebody else got is not the person"
        assert "another account of this provider" in refused.text


async def test_a_removed_person_comes_back_only_by_an_invitation(world: World) -> None:
    await member(world.app, "owner", "owner")
    async with world.browser() as browser:
        await world.sign_in(browser, account("ada", "staff"))
        person = await world.app.services.people.find_named("ada@example.org")
        await world.app.services.members.remove_person(person.id)
        refused = await world.sign_in(browser, account("ada", "staff"))
        assert refused.status_code == 403
        assert "you were removed" in refused.text
        again = await member(world.app, "ada", "viewer")
        assert (await world.sign_in(browser, account("ada", "staff"))).status_code == 303
        assert again.id in (await browser.get("/sessions")).text


async def test_a_person_of_two_organisations_goes_from_one_to_the_other(world: World) -> None:
    lakes = await world.app.services.organisations.make("lakes", by="test")
    async with world.browser() as browser:
        done = await world.sign_in(browser, account("ada", "staff", "lakes"))
        assert done.headers["location"] == page.ORGANISATION
        shown = await browser.get(page.ORGANISATION)
        form = {"form_key": form_key_in(shown.text)}
        foreign = await browser.post(page.ORGANISATION, data={**form, "organisation": "other"})
        assert foreign.status_code == 403
        wanted = MAIN if f'value="{MAIN}"' in shown.text else lakes.id
        moved = await browser.post(page.ORGANISATION, data={**form, "organisation": wanted})
        assert moved.status_code == 303
        keys, _ = await world.app.services.api_keys.page(
            workspace=None, revoked=False, limit=9, offset=0
        )
        assert [key.organisation for key in keys] == [wanted], "the key before it was revoked"
        assert (await browser.get("/")).status_code == 200


async def test_only_a_session_of_the_provider_goes_to_another_organisation(world: World) -> None:
    lakes = await world.app.services.organisations.make("lakes", by="test")
    ada = await member(world.app, "ada", "member")
    await world.app.services.members.add(lakes.id, ada.id, "owner", created_by="test")
    async with world.browser() as browser:
        await browser.post("/login", data={"api_key": ada.api_key, "next": "/"})
        shown = await browser.get(page.ORGANISATION)
        form = {"form_key": form_key_in(shown.text), "organisation": lakes.id}
        assert (await browser.post(page.ORGANISATION, data=form)).status_code == 403


async def test_a_program_is_signed_in_by_a_person_for_as_long_as_the_sign_in(world: World) -> None:
    async with world.browser() as browser:
        await world.sign_in(browser, account("ada", "staff"))
        begun = await world.app.services.device_logins.begin("laptop", "192.0.2.7")
        shown = await browser.get(device_login.PAGE, params={"code": begun.user_code})
        form = {"form_key": form_key_in(shown.text), "code": begun.user_code}
        await browser.post(device_login.PAGE, data={**form, "decision": "approve"})
        issued = await world.app.services.device_logins.poll(begun.device_code)
        assert issued.person.email == "ada@example.org"
        assert issued.api_key.expires_at is not None
        lasts_s = (issued.api_key.expires_at - issued.api_key.created_at).total_seconds()
        assert lasts_s <= 12 * 3600


async def test_groups_and_address_may_be_at_the_userinfo_endpoint(world: World) -> None:
    ada = account("ada", "staff")
    world.provider.userinfo = {**ada.claims, "sub": ada.subject}
    async with world.browser() as browser:
        assert (await world.sign_in(browser, ada)).status_code == 303
        assert await world.roles() == {MAIN: ("member", True)}
        world.provider.userinfo = {**ada.claims, "sub": "somebody-else"}
        refused = await world.sign_in(browser, ada)
        assert refused.status_code == 403
        assert "two different people" in refused.text


async def test_a_new_key_of_the_provider_is_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.browser() as browser:
        await world.sign_in(browser, account("ada", "staff"))
        world.provider.key = ECKey.generate_key("P-256", auto_kid=True)
        refused = await world.sign_in(browser, account("ada", "staff"))
        assert refused.status_code == 403, "the keys were read a moment ago"
        monkeypatch.setattr("infra.identity.oidc.provider.KEYS_AGAIN_S", 0.0)
        assert (await world.sign_in(browser, account("ada", "staff"))).status_code == 303
        world.provider.published = [
            ECKey.generate_key("P-256", auto_kid=True).as_dict(private=False)
        ] * 2
        world.provider.key = ECKey.generate_key("P-256", auto_kid=True)
        assert (await world.sign_in(browser, account("ada", "staff"))).status_code == 403
        assert world.provider.asked.count("discovery") == 1


@pytest.mark.parametrize("is_off", [False, True], ids=["held", "off"])
async def test_a_state_is_used_once(
    world: World, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    async def take_again(attempts: Attempts, state: str, secret: str) -> Any:
        return SignInAttempt(state, secret), "/"

    world.provider.forgives = True
    async with world.browser() as browser:
        back = world.provider.back(await world.begin(browser), account("ada", "staff"))
        cookie = {page.COOKIE: browser.cookies[page.COOKIE]}
        first = await browser.get("/sign-in/oidc/callback", params=back)
        assert first.status_code == 303
        assert page.COOKIE not in browser.cookies
        if is_off:
            monkeypatch.setattr(Attempts, "take", take_again)
        browser.cookies.update(cookie)
        again = await browser.get("/sign-in/oidc/callback", params=back)
        assert again.status_code == (303 if is_off else 403)


@pytest.mark.parametrize("is_off", [False, True], ids=["held", "off"])
async def test_a_sign_in_ends_only_in_the_browser_in_which_it_began(
    world: World, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    """Else somebody could lead another browser into a session of their own."""
    async with world.browser() as mine, world.browser() as other:
        back = world.provider.back(await world.begin(mine), account("eve", "staff"))
        secret = mine.cookies[page.COOKIE]

        async def take_any(attempts: Attempts, state: str, _: str) -> Any:
            return SignInAttempt(state, secret), "/"

        await world.begin(other)  # this browser has a cookie too, of another sign-in
        if is_off:
            monkeypatch.setattr(Attempts, "take", take_any)
        found = await other.get("/sign-in/oidc/callback", params=back)
        assert found.status_code == (303 if is_off else 403)
        if not is_off:
            assert "began in another browser" in found.text
            done = await mine.get("/sign-in/oidc/callback", params=back)
            assert done.status_code == 303, "and the true one still works"


async def test_a_cookie_of_a_sign_in_is_short_and_for_this_server_alone(world: World) -> None:
    async with world.browser() as browser:
        answer = await browser.get("/sign-in/oidc")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert "Max-Age=600" in cookie
        stored = await world.app.database.durable.fetchrow("select * from sign_in_attempts")
        secret = browser.cookies[page.COOKIE].encode()
        assert all(secret not in value for value in stored if isinstance(value, bytes))


async def test_a_sign_in_that_takes_too_long_ends(world: World) -> None:
    async with world.browser() as browser:
        back = world.provider.back(await world.begin(browser), account("ada", "staff"))
        await world.app.database.durable.execute(
            "update sign_in_attempts set expires_at = clock_timestamp()"
        )
        assert (await browser.get("/sign-in/oidc/callback", params=back)).status_code == 403


@pytest.mark.parametrize("is_off", [False, True], ids=["held", "off"])
@pytest.mark.parametrize("following", ["//evil.example", "https://evil.example", "/\\evil.example"])
async def test_a_sign_in_leads_to_this_server_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, following: str, is_off: bool
) -> None:
    if is_off:
        monkeypatch.setattr(page, "local_path", lambda text: text)
    async with world.browser() as browser:
        done = await world.sign_in(browser, account("ada", "staff"), following)
        assert (done.headers["location"] != "/") is is_off


@pytest.mark.parametrize("is_off", [False, True], ids=["held", "off"])
async def test_an_answer_of_another_issuer_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    async def check_nothing(provider: OidcProvider, issuer: str | None) -> None:
        return None

    if is_off:
        monkeypatch.setattr(OidcProvider, "check_issuer", check_nothing)
    async with world.browser() as browser:
        ada = account("ada", "staff")
        mixed = await world.sign_in(browser, ada, iss="https://evil.example")
        assert mixed.status_code == (303 if is_off else 403)
        back = world.provider.back(await world.begin(browser), ada)
        del back["iss"]
        without = await browser.get("/sign-in/oidc/callback", params=back)
        assert without.status_code == (303 if is_off else 403), "the provider names its issuer"


@pytest.mark.parametrize(
    "lies",
    [
        {"nonce": "another"},
        {"aud": "other"},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"email_verified": False},
        {"groups": {"admins": True}},
    ],
    ids=str,
)
async def test_a_lie_of_an_id_token_opens_no_session(world: World, lies: dict[str, Any]) -> None:
    world.provider.lies = lies
    async with world.browser() as browser:
        refused = await world.sign_in(browser, account("ada", "staff"))
        assert refused.status_code == 403
        assert (await browser.get("/")).status_code == 303
        (entry,) = await world.audit()
        assert not entry["allowed"]
        world.provider.lies = {}
        assert (await world.sign_in(browser, account("ada", "staff"))).status_code == 303


async def test_a_code_that_was_used_or_changed_opens_no_session(world: World) -> None:
    async with world.browser() as browser:
        ada = account("ada", "staff")
        for brought in (
            {"code": "wrong"},
            {"code": ""},
            {"code": "x" * 5000},
            {"error": "access_denied"},
        ):
            refused = await world.sign_in(browser, ada, **brought)
            assert refused.status_code == 403, brought
        for query in ("", "state=", "state=x&code=y", "state=" + "x" * 300, "state=%00"):
            found = await browser.get(f"/sign-in/oidc/callback?{query}")
            assert found.status_code in (400, 403), query
        assert (await browser.get("/")).status_code == 303


@pytest.mark.parametrize("is_off", [False, True], ids=["held", "off"])
async def test_a_huge_answer_is_not_read(
    world: World, monkeypatch: pytest.MonkeyPatch, is_off: bool
) -> None:
    world.provider.document = {"padding": "x" * answers.MOST_BYTES}
    if is_off:
        monkeypatch.setattr(answers, "MOST_BYTES", 2 * answers.MOST_BYTES)
    async with world.browser() as browser:
        found = await browser.get("/sign-in/oidc")
        assert found.status_code == (303 if is_off else 503)


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://evil.example/token"},
        {"token_endpoint": "file:///etc/passwd"},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"jwks_uri": "http://169.254.169.254/keys"},
        {"jwks_uri": "https://169.254.169.254/keys"},
        {"token_endpoint": None},
        {"token_endpoint_auth_methods_supported": ["private_key_jwt"]},
    ],
    ids=str,
)
async def test_a_discovery_document_with_unsafe_addresses_is_refused(
    world: World, document: dict[str, Any]
) -> None:
    world.provider.document = document
    async with world.browser() as browser:
        found = await browser.get("/sign-in/oidc")
        assert found.status_code == 503
        assert "sign in with an API key" in found.text


async def test_a_provider_that_is_slow_or_away_holds_up_nobody_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProviderRequests, "__init__", _impatient(ProviderRequests.__init__))
    async with world.browser() as browser:
        back = world.provider.back(await world.begin(browser), account("ada", "staff"))
        world.provider.holds = asyncio.Event()
        waiting = asyncio.ensure_future(browser.get("/sign-in/oidc/callback", params=back))
        while "token" not in world.provider.asked:
            await asyncio.sleep(0.01)
        async with world.browser() as other:
            assert (await other.get("/login")).status_code == 200
        assert not waiting.done()
        answer = await waiting
        assert answer.status_code == 503
        world.provider.holds.set()


def _impatient(made: Any) -> Any:
    def make(self: ProviderRequests, *given: Any, **named: Any) -> None:
        made(self, *given, **{**named, "within_s": 0.5})

    return make


async def test_a_dead_provider_is_not_asked_by_each_request(
    database_url: str, tmp_path: Path
) -> None:
    dead = environment("http://127.0.0.1:1", GROUPS)
    async with application(database_url, tmp_path / "home", environ=dead) as app:
        world = World(app, LyingProvider())
        async with world.browser() as browser:
            found = await asyncio.gather(*(browser.get("/sign-in/oidc") for _ in range(30)))
            assert {one.status_code for one in found} == {503}
            assert (await browser.get("/login")).status_code == 200


async def test_sign_ins_of_an_address_are_limited(world: World) -> None:
    async with world.browser() as browser:
        found = [(await browser.get("/sign-in/oidc")).status_code for _ in range(70)]
        assert 429 in found
        assert found[0] == 303
    kept = await world.app.database.durable.fetchval("select count(*) from sign_in_attempts")
    assert kept <= 61


async def test_expired_keys_of_sign_ins_do_not_count_as_valid_ones(world: World) -> None:
    async with world.browser() as browser:
        for _ in range(2):
            await world.sign_in(browser, account("ada", "staff"))
            await world.app.database.durable.execute(
                "update api_keys set expires_at = clock_timestamp()"
            )
        await world.sign_in(browser, account("ada", "staff"))
    left = await world.app.database.durable.fetchval(
        "select count(*) from api_keys where revoked_at is null"
    )
    assert left == 1
