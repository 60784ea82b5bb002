"""The forges of connected workspaces: links, workspaces without a token, and GitHub Apps."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra.repositories.forge_connections import ForgeConnection
from infra.repositories.forges import app_tokens
from infra.repositories.forges.api import ForgeApis
from infra.repositories.git.credentials import (
    AppCredential,
    Credential,
    KeyCredential,
    TokenCredential,
)
from infra.settings.git import LAPTOP
from schemas.errors import ForgeAway, InvalidConfig, Refused
from schemas.specs import CommitStatus
from tests.kit.forge_server import APP_ID, COMMIT, INSTALLATION, TOKEN, FakeGitHub, Reply, serving

STATUS = CommitStatus(
    workspace="w", sha=COMMIT, context="headrace", state="pending", text="queued", link="/runs/x"
)


@pytest.fixture(scope="module")
def keys() -> tuple[str, str]:
    """The private and the public key of an App, in PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private.decode(), public.decode()


@pytest.fixture
def server(keys: tuple[str, str]) -> Iterator[FakeGitHub]:
    forge = FakeGitHub()
    forge.public_key = keys[1]
    with serving(forge):
        yield forge


@pytest.fixture
def app(keys: tuple[str, str]) -> AppCredential:
    return AppCredential(APP_ID, keys[0])


class Connected:
    """The connection that `ForgeApis` finds, which a test may replace."""

    def __init__(self) -> None:
        self.found: ForgeConnection | None = None

    async def find(self, workspace: str) -> ForgeConnection | None:
        assert workspace == "w"
        return self.found


@pytest.fixture
def connected(server: FakeGitHub) -> Connected:
    connected = Connected()
    connected.found = ForgeConnection(
        "w", "github", server.url, credential=TokenCredential("git", TOKEN)
    )
    return connected


@pytest.fixture
async def apis(connected: Connected) -> AsyncIterator[ForgeApis]:
    async with ForgeApis(
        connected.find, public_url="https://h.example/base/", allowed=LAPTOP.addresses
    ) as apis:
        yield apis


def use(connected: Connected, credential: Credential | None) -> None:
    assert connected.found is not None
    connected.found = replace(connected.found, credential=credential)


async def test_a_link_leads_to_the_public_address(apis: ForgeApis, server: FakeGitHub) -> None:
    assert await apis.post(STATUS) is True
    assert await apis.post(STATUS) is True
    [(*_, link)] = server.shown_statuses()
    assert link == "https://h.example/base/runs/x"


@pytest.mark.parametrize("credential", [None, KeyCredential("key")])
async def test_without_a_token_nothing_is_posted(
    apis: ForgeApis, server: FakeGitHub, connected: Connected, credential: Credential | None
) -> None:
    use(connected, credential)
    assert await apis.post(STATUS) is False
    assert await apis.git_credentials("w") == credential
    connected.found = None
    assert await apis.post(STATUS) is False
    assert await apis.git_credentials("w") is None
    assert server.requests == []


async def test_a_process_that_asks_no_forge_reads_no_certificates(
    apis: ForgeApis, connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them takes 40 ms of CPU at the end of each process."""
    connected.found = None
    assert await apis.post(STATUS) is False
    monkeypatch.setattr(httpx, "create_ssl_context", lambda: pytest.fail("they were read"))
    await apis.aclose()


async def test_a_directory_has_no_forge(apis: ForgeApis) -> None:
    assert (
        apis.open(ForgeConnection("w", "none", "/srv/r", credential=TokenCredential("a", "b")))
        is None
    )


@pytest.mark.parametrize("installation", [None, INSTALLATION])
async def test_an_app_posts_with_an_installation_token(
    apis: ForgeApis,
    server: FakeGitHub,
    connected: Connected,
    app: AppCredential,
    installation: str | None,
) -> None:
    use(connected, replace(app, installation=installation))
    assert await apis.post(STATUS) is True
    assert len(server.shown_statuses()) == 1
    credential = await apis.git_credentials("w")
    assert credential == TokenCredential("x-access-token", next(iter(server.app_tokens)))
    assert len(server.app_tokens) == 1


async def test_a_token_is_replaced_before_it_expires(
    apis: ForgeApis, server: FakeGitHub, connected: Connected, app: AppCredential
) -> None:
    use(connected, app)
    server.lives_s = app_tokens.MARGIN_S + 2
    first = await apis.git_credentials("w")
    assert await apis.git_credentials("w") == first
    server.lives_s = app_tokens.MARGIN_S - 2
    server.app_tokens.clear()
    apis._tokens._kept.clear()
    second = await apis.git_credentials("w")
    third = await apis.git_credentials("w")
    assert first != second != third


async def test_a_revoked_installation_token_is_made_again(
    apis: ForgeApis,
    server: FakeGitHub,
    connected: Connected,
    app: AppCredential,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(connected, app)
    await apis.post(STATUS)
    server.app_tokens.clear()
    with pytest.raises(Refused, match="answers 401"):  # the token is fresh: another is no better
        await apis.post(STATUS)
    monkeypatch.setattr(app_tokens, "FRESH_S", 0.0)
    with pytest.raises(ForgeAway, match="a new one is made"):
        await apis.post(STATUS)
    assert await apis.post(STATUS) is True


async def test_an_app_that_is_not_installed_is_refused(
    apis: ForgeApis, server: FakeGitHub, connected: Connected, app: AppCredential
) -> None:
    use(connected, app)
    server.planned.append(Reply(404, {"message": "Not Found"}))
    with pytest.raises(Refused, match="answers 404"):
        await apis.post(STATUS)


async def test_another_apps_key_is_refused(
    apis: ForgeApis, server: FakeGitHub, connected: Connected, app: AppCredential
) -> None:
    use(connected, replace(app, app_id="1"))
    with pytest.raises(Refused, match="answers 401"):
        await apis.post(STATUS)


@pytest.mark.parametrize("key", ["", "hush-hush", "-----BEGIN RSA PRIVATE KEY-----\nhush\n"])
async def test_a_key_that_cannot_be_read_is_not_shown(
    apis: ForgeApis, connected: Connected, key: str
) -> None:
    use(connected, AppCredential(APP_ID, key))
    with pytest.raises(InvalidConfig, match="give the PEM file") as refused:
        await apis.post(STATUS)
    assert "hush" not in str(refused.value)
    assert refused.value.__suppress_context__


async def test_an_app_is_for_github_only(
    apis: ForgeApis, connected: Connected, app: AppCredential
) -> None:
    assert connected.found is not None
    for forge in ("gitea", "gitlab"):
        found = replace(connected.found, forge=forge, credential=app)
        with pytest.raises(InvalidConfig, match="use --token-env"):
            apis.open(found)
