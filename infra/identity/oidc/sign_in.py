"""A sign-in with the provider, from the button to the session: begun in a browser, ended by the same."""

from dataclasses import dataclass

from infra.identity.oidc.accounts import Accounts, SignedIn
from infra.identity.oidc.attempts import Attempts, SignInAttempt
from infra.identity.oidc.id_token import SignInRefused
from infra.identity.oidc.provider import OidcProvider
from infra.identity.recent_api_keys import RecentApiKeys
from infra.settings.oidc import OidcSettings
from infra.spine.ports.clock import Clock
from infra.spine.postgres.pool import Database
from schemas.text import plain

LONGEST_CODE = 4000
BEGIN_AGAIN = (
    "this sign-in was used, is older than ten minutes, or began in another browser; sign in again"
)


@dataclass(frozen=True, slots=True)
class ReturnedBrowser:
    """The values that a browser brings back from the provider, and the secret of its cookie."""

    state: str
    secret: str
    code: str | None = None
    error: str | None = None
    issuer: str | None = None


class OidcSignIns:
    """Begins and ends sign-ins with the provider."""

    def __init__(self, provider: OidcProvider, attempts: Attempts, accounts: Accounts) -> None:
        self.accounts = accounts
        self._provider, self._attempts = provider, attempts

    async def begin(self, following: str) -> tuple[SignInAttempt, str]:
        """Begin a sign-in that leads to a path of this server. Returns it with the address of the
        provider. Raises SignInAway."""
        attempt = await self._attempts.begin(following)
        return attempt, await self._provider.authorization_url(attempt)

    async def end(self, returned: ReturnedBrowser) -> tuple[SignedIn, str]:
        """End a sign-in. Returns the person, and the path of this server. The state is used up first,
        whatever the provider says. Raises SignInRefused, SignInAway, Conflict."""
        taken = await self._attempts.take(returned.state, returned.secret)
        if taken is None:
            raise SignInRefused(BEGIN_AGAIN)
        attempt, following = taken
        await self._provider.check_issuer(returned.issuer)
        if returned.error is not None:
            error = plain(returned.error)[:100]
            raise SignInRefused(f"the provider did not sign you in ({error}); sign in again")
        if not returned.code or len(returned.code) > LONGEST_CODE:
            raise SignInRefused("the provider sent no code; sign in again")
        identity = await self._provider.redeem(returned.code, attempt)
        return await self.accounts.sign_in(identity), following

    async def aclose(self) -> None:
        """Close the connections to the provider."""
        await self._provider.aclose()


def open_sign_ins(
    settings: OidcSettings,
    redirect_uri: str,
    database: Database,
    recent: RecentApiKeys,
    clock: Clock,
) -> OidcSignIns:
    """Sign-ins with the provider of the settings, which sends browsers back to `redirect_uri`."""
    return OidcSignIns(
        OidcProvider(settings, redirect_uri, clock),
        Attempts(database),
        Accounts(database, settings, recent, clock),
    )
