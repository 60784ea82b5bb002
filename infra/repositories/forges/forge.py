"""The interface to one repository on one forge."""

from dataclasses import dataclass, field
from typing import Protocol

from schemas.specs import StatusState

MOST_TEXT = 140
"""The longest description of a status that GitHub takes."""


@dataclass(frozen=True, slots=True)
class PushHook:
    """A webhook for pushes: where it posts, and the secret that signs what it posts."""

    url: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ShownStatus:
    """A status as a commit shows it, with a full link."""

    context: str
    state: StatusState
    text: str
    link: str | None


class Forge(Protocol):
    """One repository on a forge. All methods raise Refused when the forge refuses the request, and
    ForgeAway when it does not answer or asks to wait."""

    async def check(self) -> None:
        """Verify that the token can see the repository."""
        ...

    async def put_hook(self, hook: PushHook) -> str:
        """Make the webhook, or replace the one with the same URL. Returns its id."""
        ...

    async def delete_hook(self, url: str) -> bool:
        """Delete the webhooks with this URL. Returns whether there was one."""
        ...

    async def post_status(self, sha: str, status: ShownStatus) -> bool:
        """Show a status on a commit. Returns False if the commit shows the same one already."""
        ...
