"""A person whose address was only claimed, and the account of a sign-in provider that proves it."""

from pathlib import Path

import pytest

from infra.identity.oidc.accounts import Accounts
from infra.identity.oidc.id_token import SignInRefused
from infra.identity.oidc.provider import Identity
from infra.ports.actor import MAIN, Actor
from infra.settings.settings import Settings
from producers.http.credentials import Credentials
from schemas.errors import InvalidConfig
from tests.kit.application import Application, application
from tests.kit.people import member
from tests.kit.tenants import ask

pytestmark = pytest.mark.postgres

ISSUER = "https://login.example"


def identity(email: str) -> Identity:
    return Identity(ISSUER, "subject-1", email, True, "Victoria", frozenset({"staff"}))


def accounts_of(app: Application, home: Path) -> Accounts:
    settings = Settings.load(
        {
            "HEADRACE_HOME": str(home),
            "HEADRACE_OIDC_ISSUER": ISSUER,
            "HEADRACE_OIDC_CLIENT_ID": "c",
            "HEADRACE_OIDC_CLIENT_SECRET": "s",
            "HEADRACE_OIDC_GROUPS": "staff=main:owner",
            "HEADRACE_PUBLIC_URL": "https://headrace.example",
        }
    ).oidc
    assert settings is not None
    services = app.services
    return Accounts(app.database, settings, services.recent_api_keys, services.clock)


async def test_a_claim_of_an_address_keeps_no_key_when_the_provider_proves_whose_it_is(
    database_url: str, tmp_path: Path
) -> None:
    """The key would reach the personal secrets of the person and see the person's organisations."""
    async with application(database_url, tmp_path / "home") as app:
        await app.database.durable.execute(
            "insert into organisations (id, name, title, created_by) values ('o2', 'mal', 'Mal', 't')"
        )
        mallory = await member(app, "victoria", "owner", organisation="o2")
        found = await Credentials(app.services).actor_with(mallory.api_key, "192.0.2.1")
        assert isinstance(found, Actor)
        await app.services.invitations.invite("o2", "owner", None, found)
        waiting = await app.services.device_logins.begin("laptop", "192.0.2.1")
        await app.services.device_logins.approve(waiting.user_code, found)

        signed_in = await accounts_of(app, tmp_path).sign_in(identity(mallory.email))

        assert signed_in.person.id == mallory.id
        assert {one.organisation for one in signed_in.memberships} == {MAIN, "o2"}
        assert (await ask(app, "GET", "/api/v1/whoami", mallory.api_key)).status_code == 401
        assert await app.services.invitations.list_open("o2") == []
        logins = await app.database.durable.fetchval("select count(*) from device_logins")
        assert logins == 0
        query = "select id from api_keys where person = $1 and revoked_at is null"
        kept = [row["id"] for row in await app.database.durable.fetch(query, mallory.id)]
        assert kept == [signed_in.bearer.api_key]

        again = await accounts_of(app, tmp_path).sign_in(identity(mallory.email))
        kept = [row["id"] for row in await app.database.durable.fetch(query, mallory.id)]
        assert {signed_in.bearer.api_key, again.bearer.api_key} == set(kept), "only the first time"


KELVIN, DOTTED, WIDE = "\N{KELVIN SIGN}", "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}", "\uff4b"


@pytest.mark.parametrize(
    "email",
    [f"{KELVIN}im@example.org", f"k{DOTTED}m@example.org", f"{WIDE}im@example.org"],
)
async def test_an_address_with_a_lookalike_of_a_letter_is_nobodys(
    database_url: str, tmp_path: Path, email: str
) -> None:
    """A database with the rules of a language finds `kim` by `lower()` of the Kelvin sign."""
    async with application(database_url, tmp_path / "home") as app:
        kim = await member(app, "kim", "viewer")
        with pytest.raises(InvalidConfig, match="must be an address"):
            await app.services.people.add("Kim", email, created_by="test")
        with pytest.raises(SignInRefused, match="cannot be one"):
            await accounts_of(app, tmp_path).sign_in(identity(email))
        people, _ = await app.services.people.page(removed=False, limit=9, offset=0)
        assert [one.id for one in people] == [kim.id]


async def test_an_address_with_letters_of_its_own_is_a_persons(
    database_url: str, tmp_path: Path
) -> None:
    async with application(database_url, tmp_path / "home") as app:
        decomposed = "e\N{COMBINING ACUTE ACCENT}lise@example.org"
        made = await app.services.people.add("Elise", decomposed, created_by="test")
        assert made.email == "\u00e9lise@example.org"
        again = await accounts_of(app, tmp_path).sign_in(identity(decomposed))
        assert again.person.id == made.id
