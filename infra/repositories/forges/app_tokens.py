"""Installation tokens of GitHub Apps: made with a JWT that the App's private key signs, and kept until
shortly before they expire."""

import time
from dataclasses import dataclass, field
from datetime import datetime

from gidgethub.apps import get_jwt

from infra.repositories.forges.address import RepositoryAddress
from infra.repositories.forges.github import ForgeRequests, reading_answers
from infra.repositories.git.credentials import AppCredential
from schemas.errors import InvalidConfig

MARGIN_S = 300.0
"""How long before it expires a token is replaced. GitHub's live for an hour."""

FRESH_S = 60.0
MOST_KEPT = 1000


@dataclass(frozen=True, slots=True)
class InstallationToken:
    """A token of an installation, with the times at which it was made and expires."""

    token: str = field(repr=False)
    made: float
    until: float


class AppTokens:
    """The installation tokens of this process."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], InstallationToken] = {}

    async def get_token(
        self, requests: ForgeRequests, app: AppCredential, address: RepositoryAddress
    ) -> str:
        """Return a token for one repository. Raises Refused when the App is not installed there, and
        InvalidConfig when its key cannot be read."""
        key = _key(app, address)
        held = self._kept.pop(key, None)
        if held is None or time.time() >= held.until - MARGIN_S:
            held = await _make(requests, app, address)
        while len(self._kept) >= MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = held
        return held.token

    def forget(self, app: AppCredential, address: RepositoryAddress) -> bool:
        """Drop a token that the forge refused. Returns False if there was none, or a fresh one, because
        another one would be refused too."""
        held = self._kept.get(_key(app, address))
        if held is None or time.time() - held.made < FRESH_S:
            return False
        del self._kept[_key(app, address)]
        return True


async def _make(
    requests: ForgeRequests, app: AppCredential, address: RepositoryAddress
) -> InstallationToken:
    try:
        signed = get_jwt(app_id=app.app_id, private_key=app.private_key)
    except Exception:
        raise InvalidConfig(  # without its cause, which could show the key
            f"the private key of GitHub App {app.app_id} cannot be read; give the PEM file that GitHub "
            "made for the App"
        ) from None
    names = {"owner": address.owner, "name": address.name}
    with reading_answers(address.host):
        installation = app.installation
        if installation is None:
            found = await requests.getitem("/repos/{owner}/{name}/installation", names, jwt=signed)
            installation = str(found["id"])
        made = await requests.post(
            "/app/installations/{id}/access_tokens",
            {"id": installation},
            data={"repositories": [address.name]},
            jwt=signed,
        )
        until = datetime.fromisoformat(made["expires_at"]).timestamp()
        return InstallationToken(str(made["token"]), made=time.time(), until=until)


def _key(app: AppCredential, address: RepositoryAddress) -> tuple[str, ...]:
    return (address.origin, address.path, app.app_id, app.installation or "")
