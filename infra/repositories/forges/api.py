"""The forges of all connected workspaces: `infra.ports.services.Forges`, and credentials for git."""

import logging
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Protocol, Self

import httpx

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.http.checked_client import CheckedTransport, no_cookies
from infra.repositories.forges.address import RepositoryAddress
from infra.repositories.forges.app_tokens import AppTokens
from infra.repositories.forges.forge import Forge, ShownStatus
from infra.repositories.forges.github import ForgeRequests, GetToken, GiteaForge, GitHubForge
from infra.repositories.forges.gitlab import GitLabForge
from infra.repositories.forges.transport import ForgeRefusal, Transport
from infra.repositories.git.credentials import (
    AppCredential,
    Credential,
    GitCredential,
    TokenCredential,
)
from infra.settings.git import AllowedAddresses
from schemas.errors import ForgeAway, InvalidConfig, Refused
from schemas.events import ForgeKind
from schemas.secrets.redact import redact_setting
from schemas.specs import CommitStatus

logger = logging.getLogger(__name__)

APP_USER = "x-access-token"
"""The name under which git uses an installation token of a GitHub App."""

USERS: dict[ForgeKind, str] = {"github": APP_USER, "gitlab": "oauth2"}

NEEDS: dict[ForgeKind, str] = {
    "github": "it needs the repository permissions `Commit statuses` and `Webhooks`, read and write",
    "gitea": "it needs the scope `write:repository`, of a user who administers the repository",
    "gitlab": "it needs the scope `api` and the role Maintainer in the project",
}

CONNECT_S = 10.0
READ_S = 20.0


def git_user(forge: ForgeKind | None) -> str:
    """Return the name under which git sends a token to a forge. All others take any name."""
    return "git" if forge is None else USERS.get(forge, "git")


class ForgeAccess(Protocol):
    """A workspace's connection to its forge, as far as the APIs need it."""

    @property
    def forge(self) -> ForgeKind: ...
    @property
    def url(self) -> str: ...
    @property
    def credential(self) -> Credential | None: ...


class ForgeApis:
    """`Forges` of the connections that `find` returns by workspace. Links of statuses lead to
    `public_url`. Forges are reached at `allowed` and public addresses. Close it with `aclose`, or use it
    as a context manager."""

    def __init__(
        self,
        find: Callable[[str], Awaitable[ForgeAccess | None]],
        *,
        public_url: str,
        allowed: AllowedAddresses = AllowedAddresses(),  # noqa: B008 - it is frozen
        resolve: Resolve = resolve,
        client: httpx.AsyncClient | None = None,
    ) -> None:
        self._find = find
        self._dialling = CheckedDialling(allowed, resolve=resolve)
        self._public_url = public_url.rstrip("/")
        self._given = client
        self._tokens = AppTokens()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """The HTTP client. It is made at first use, because that takes a moment."""
        if self._given is not None:
            return self._given
        tls, limits = httpx.create_ssl_context(), httpx.Limits(max_connections=100)
        return httpx.AsyncClient(
            timeout=httpx.Timeout(READ_S, connect=CONNECT_S),
            transport=CheckedTransport(self._dialling, tls=tls, limits=limits),
            cookies=no_cookies(),
        )

    async def aclose(self) -> None:
        """Close the connections to the forges, if any was opened."""
        opened: httpx.AsyncClient | None = vars(self).get("_client", self._given)
        if opened is not None:
            await opened.aclose()

    async def post(self, status: CommitStatus) -> bool:
        """Show a status on a commit, unless the commit shows it already. Returns False when the
        workspace is not connected, or has no token. Raises Refused, ForgeAway."""
        connection = await self._find(status.workspace)
        if connection is None:
            return False
        try:
            forge = self.open(connection)
            if forge is None:
                return False
            link = None if status.link is None else self._public_url + status.link
            shown = ShownStatus(status.context, status.state, status.text, link)
            await forge.post_status(status.sha, shown)
        except Refused as refused:
            is_401 = isinstance(refused, ForgeRefusal) and refused.answered == 401
            if is_401 and self._forget(connection):
                raise ForgeAway(
                    "the forge refuses the App's installation token before it expires; a new one is "
                    "made"
                ) from refused
            repository = redact_setting(connection.url)
            logger.warning("%s shows no status on %s: %s", repository, status.sha, refused)
            raise
        return True

    def open(self, connection: ForgeAccess) -> Forge | None:
        """Return the forge of a connection, or None when there is no API to use: the kind is
        `none`, or the credential is none of its own. Raises InvalidConfig when the address names no
        repository on a forge, or the credential does not fit the forge."""
        forge, credential = connection.forge, connection.credential
        if forge == "none" or not isinstance(credential, TokenCredential | AppCredential):
            return None
        address = RepositoryAddress.parse(connection.url)
        base = address.api(forge)
        transport = Transport(self._client, base, needs=NEEDS[forge])
        requests = ForgeRequests(transport, base)
        token = self._token(credential, requests, address)
        match forge:
            case "github":
                return GitHubForge(requests, address, token)
            case _ if isinstance(credential, AppCredential):
                raise InvalidConfig(f"{forge} takes no GitHub App as a credential; use --token-env")
            case "gitlab":
                return GitLabForge(transport, address, token)
            case _:
                return GiteaForge(requests, address, token)

    async def git_credentials(self, workspace: str) -> GitCredential | None:
        """Return the credential with which git opens the repository of a workspace (its id), or None.
        Raises Refused, ForgeAway when a GitHub App gets no token."""
        connection = await self._find(workspace)
        return None if connection is None else await self.git_credential(connection)

    async def git_credential(self, connection: ForgeAccess) -> GitCredential | None:
        """The same for a connection that need not be stored."""
        credential = connection.credential
        if not isinstance(credential, AppCredential):
            return credential
        address = RepositoryAddress.parse(connection.url)
        base = address.api("github")
        requests = ForgeRequests(Transport(self._client, base, needs=NEEDS["github"]), base)
        return TokenCredential(
            APP_USER, await self._tokens.get_token(requests, credential, address)
        )

    def _token(
        self,
        credential: TokenCredential | AppCredential,
        requests: ForgeRequests,
        address: RepositoryAddress,
    ) -> GetToken:
        async def get() -> str:
            if isinstance(credential, TokenCredential):
                return credential.token
            return await self._tokens.get_token(requests, credential, address)

        return get

    def _forget(self, connection: ForgeAccess) -> bool:
        """Drop the installation token of a connection. Returns whether another one may be accepted."""
        credential = connection.credential
        if not isinstance(credential, AppCredential):
            return False
        return self._tokens.forget(credential, RepositoryAddress.parse(connection.url))
