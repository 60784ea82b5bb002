"""The settings of sign-in with OpenID Connect."""

import pytest

from infra.ports.actor import ROLES
from infra.settings import oidc
from infra.settings.oidc import GroupRole, OidcSettings, parse_groups
from infra.settings.settings import BadSetting, Settings

GOOD = {
    "HEADRACE_OIDC_ISSUER": "https://id.example.org/realms/acme",
    "HEADRACE_OIDC_CLIENT_ID": "headrace",
    "HEADRACE_OIDC_CLIENT_SECRET": "never-shown",
}


def loaded(**changed: str) -> OidcSettings:
    named = {f"HEADRACE_OIDC_{name}": value for name, value in changed.items()}
    found = Settings.load({**GOOD, **named}).oidc
    assert found is not None
    return found


def test_nothing_is_set_up_without_an_issuer() -> None:
    assert Settings.load({}).oidc is None
    with pytest.raises(
        BadSetting, match="HEADRACE_OIDC_GROUPS is set without HEADRACE_OIDC_ISSUER"
    ):
        Settings.load({"HEADRACE_OIDC_GROUPS": "a=main:owner"})


def test_the_usual_values_are_those_of_the_page_of_settings() -> None:
    found = loaded()
    assert found.scopes == ("openid", "email", "profile")
    assert (found.groups_claim, found.groups, found.hours) == ("groups", (), 12)
    assert (found.host, found.is_local) == ("id.example.org", False)


def test_the_secret_is_not_shown() -> None:
    assert "never-shown" not in repr(loaded())
    assert "never-shown" not in repr(Settings.load(GOOD))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ISSUER", "http://id.example.org"),
        ("ISSUER", "http://127.0.0.1.example.org"),
        ("ISSUER", "https://user:password@id.example.org"),
        ("ISSUER", "https://id.example.org?tenant=a"),
        ("ISSUER", "https://id.example.org/#a"),
        ("ISSUER", "https://id example.org"),
        ("ISSUER", "https://"),
        ("ISSUER", "https://id.example.org:99999"),
        ("ISSUER", "id.example.org"),
        ("SCOPES", "email profile"),
        ("SCOPES", 'openid "x"'),
        ("GROUPS_CLAIM", "my groups"),
        ("GROUPS", "staff"),
        ("GROUPS", "staff=main"),
        ("GROUPS", "staff=main:admin"),
        ("GROUPS", "=main:owner"),
        ("GROUPS", "staff=Main:owner"),
        ("HOURS", "0"),
        ("HOURS", "2161"),
        ("HOURS", "1.5"),
    ],
)
def test_a_bad_value_is_named_with_what_may_be(name: str, value: str) -> None:
    with pytest.raises(BadSetting) as raised:
        loaded(**{name: value})
    line = str(raised.value)
    assert f"HEADRACE_OIDC_{name} holds {value!r}; it may hold" in line
    assert "never-shown" not in line
    assert "\n" not in line


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "naïve"])
@pytest.mark.parametrize("name", ["CLIENT_ID", "CLIENT_SECRET"])
def test_a_bad_client_or_secret_is_named_without_its_value(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"HEADRACE_OIDC_{name} is empty, or holds") as raised:
        loaded(**{name: value})
    assert not value or value not in str(raised.value)


@pytest.mark.parametrize(
    "issuer", ["http://127.0.0.1:8080", "http://localhost/a", "http://[::1]:1"]
)
def test_plain_http_is_for_a_provider_on_this_machine(issuer: str) -> None:
    assert loaded(ISSUER=issuer).is_local


def test_groups_give_roles_in_organisations() -> None:
    assert parse_groups("sums-admins=acme:owner, sums=acme:member,sums=main:viewer,") == (
        GroupRole("sums-admins", "acme", "owner"),
        GroupRole("sums", "acme", "member"),
        GroupRole("sums", "main", "viewer"),
    )
    named = "cn%3Dadmins%2Cou%3Da%25b=main:owner,/realm/a=b=main:viewer"
    assert [one.group for one in parse_groups(named)] == ["cn=admins,ou=a%b", "/realm/a=b"]
    with pytest.raises(ValueError, match="names the group 'a' twice"):
        parse_groups("a=main:owner,a=main:member")


def test_the_roles_are_those_of_members() -> None:
    assert oidc.ROLES == ROLES
