"""Signing in from a program without a browser of its own (RFC 8628): the program shows a code, a person
who is signed in to the dashboard approves it, and the program gets an API key of that person.

The key has the scopes and the reach of the API key that approved, within the person's role, and ends
with the person's membership. A code lasts LASTS_S and works once.
"""

import math
from dataclasses import dataclass, field
from datetime import timedelta

from infra.http.request_limits import Rate, RequestLimits
from infra.identity.api_keys import ApiKey
from infra.identity.device_logins import Approval, DeviceLoginStore, WaitingLogin
from infra.identity.issuing import BeyondRights
from infra.identity.people import People, Person
from infra.identity.recent_api_keys import RecentApiKeys
from infra.ports.actor import Actor
from infra.spine.ports.clock import Clock
from schemas.errors import InvalidConfig, Issue, NotFound, QuotaExceeded, Refused

LASTS_S = 600
"""How long a code can be approved and used."""

INTERVAL_S = 5
"""How long a program waits between its questions, unless an answer makes it longer."""

SLOWER_S = 5
KEY_LASTS_S = 90 * 24 * 3600
LONGEST_DEVICE_NAME = 100
PAGE = "/device"

WRONG_CODES = Rate(per_minute=10)
"""How many wrong user codes a person may send."""

ORGANISATION_WRONG_CODES = Rate(per_minute=100)
"""How many wrong user codes the people of an organisation may send together. There is no limit for all
organisations: the owner of one can make many people, and would keep everybody else from signing in."""


class DeviceLoginPending(Refused):
    """The code is not approved yet."""

    code = "AUTHORIZATION_PENDING"


class SlowDown(Refused):
    """The program asks too often. It must wait `interval_s` seconds between questions from now on."""

    code = "SLOW_DOWN"

    def __init__(self, message: str, *, interval_s: int) -> None:
        super().__init__(message)
        self.interval_s = interval_s


class DeviceLoginExpired(Refused):
    """The code is unknown, used or too old."""

    code = "EXPIRED_TOKEN"


class DeviceLoginDenied(Refused):
    """The person denied the code, or the approval does not stand any more."""

    code = "ACCESS_DENIED"


@dataclass(frozen=True, slots=True)
class BegunLogin:
    """A login that waits. `verification_path` is the page of this server that takes the user code."""

    device_code: str = field(repr=False)
    user_code: str = field(repr=False)
    verification_path: str = PAGE
    expires_in_s: int = LASTS_S
    interval_s: int = INTERVAL_S


@dataclass(frozen=True, slots=True)
class IssuedLogin:
    """The API key that a login became, its text, which is shown once, and its person."""

    api_key: ApiKey
    secret: str = field(repr=False)
    person: Person


class DeviceLogins:
    """Begins, approves and completes device logins. `wrong_codes` limits the guesses of user codes of
    each person, and `organisation_wrong_codes` those of all people of an organisation."""

    def __init__(
        self,
        store: DeviceLoginStore,
        people: People,
        recent: RecentApiKeys,
        clock: Clock,
        wrong_codes: RequestLimits | None = None,
        organisation_wrong_codes: RequestLimits | None = None,
    ) -> None:
        self._store, self._people, self._recent, self._clock = store, people, recent, clock
        self._of_people = wrong_codes or RequestLimits(each=WRONG_CODES, clock=clock.elapsed_s)
        self._of_organisations = organisation_wrong_codes or RequestLimits(
            each=ORGANISATION_WRONG_CODES, clock=clock.elapsed_s
        )

    async def begin(self, device_name: str, address: str) -> BegunLogin:
        """Begin a login of a device at a network address. Raises InvalidConfig for a name that cannot be
        shown."""
        name = _check_device_name(device_name)
        codes = await self._store.begin(
            name, address, interval_s=INTERVAL_S, lasts_s=float(LASTS_S)
        )
        return BegunLogin(codes.device, codes.user)

    async def poll(self, device_code: str) -> IssuedLogin:
        """The API key of an approved login, once. Raises DeviceLoginPending, SlowDown,
        DeviceLoginExpired and DeviceLoginDenied."""
        progress = await self._store.poll(device_code, slower_s=SLOWER_S)
        if progress is None:
            raise DeviceLoginExpired("this login is unknown, used or too old; start it again")
        if progress.is_too_soon:
            raise SlowDown(
                f"ask again after {progress.interval_s} seconds", interval_s=progress.interval_s
            )
        if progress.is_approved is None:
            raise DeviceLoginPending("the code is not approved yet; ask again")
        made = await self._store.redeem(device_code) if progress.is_approved else None
        if made is None:
            await self._store.forget(device_code)
            raise DeviceLoginDenied("this login was denied; start it again")
        api_key, issued = made
        self._recent.forget()
        person = await self._people.find(str(api_key.person))
        return IssuedLogin(api_key, issued.text, person)

    async def find(self, user_code: str, actor: Actor) -> WaitingLogin:
        """The login that waits under a user code, for the person who may approve it. Raises NotFound for
        a wrong code, QuotaExceeded after too many, and BeyondRights for an API key of nobody."""
        self._count_guess(actor)
        found = await self._store.find(user_code)
        if found is None:
            raise _wrong_code()
        self._forget_guess(actor)
        return found

    async def approve(self, user_code: str, actor: Actor) -> str:
        """Approve a login for the person of an actor, and return the name of the device. Raises as
        `find` does."""
        now = self._clock.now()
        expires_at = now + timedelta(seconds=KEY_LASTS_S)
        if actor.expires_at is not None:
            expires_at = min(expires_at, actor.expires_at)
        approval = Approval(
            person=_person_of(actor),
            organisation=str(actor.organisation),
            workspace=actor.workspace,
            approved_by=actor.api_key,
            expires_at=expires_at,
        )
        return await self._decide(user_code, actor, approval)

    async def deny(self, user_code: str, actor: Actor) -> str:
        """Deny a login, and return the name of the device. Raises as `find` does."""
        return await self._decide(user_code, actor, None)

    async def _decide(self, user_code: str, actor: Actor, approval: Approval | None) -> str:
        self._count_guess(actor)
        device_name = await self._store.decide(user_code, approval)
        if device_name is None:
            raise _wrong_code()
        self._forget_guess(actor)
        return device_name

    def _count_guess(self, actor: Actor) -> None:
        """Count a code as wrong before it is looked up, so that of many codes which are sent at the same
        time no more are looked up than of those that are sent one after the other."""
        person = _person_of(actor)
        wait_s = self._of_people.take_s(person)
        if not wait_s and (wait_s := self._of_organisations.take_s(str(actor.organisation))):
            self._of_people.give_back(person)
        if wait_s:
            raise QuotaExceeded(
                f"too many wrong codes; try again in {math.ceil(wait_s)} seconds", retry_s=wait_s
            )

    def _forget_guess(self, actor: Actor) -> None:
        """A code that was right is not counted."""
        self._of_people.give_back(_person_of(actor))
        self._of_organisations.give_back(str(actor.organisation))


def _wrong_code() -> NotFound:
    return NotFound(
        "no login waits under this code: it was mistyped, used already, or is older than "
        f"{LASTS_S // 60} minutes; start the login again"
    )


def _person_of(actor: Actor) -> str:
    if actor.person_id is None or actor.organisation is None:
        raise BeyondRights(
            "you are signed in with an API key that belongs to nobody; sign in with the key of a "
            "person, which an invitation gives (`headrace member invite`)"
        )
    return actor.person_id


def _check_device_name(text: str) -> str:
    name = " ".join(text.split())
    if not name or len(name) > LONGEST_DEVICE_NAME or not name.isprintable():
        message = f"must be 1 to {LONGEST_DEVICE_NAME} printable characters, got {text[:40]!r}"
        raise InvalidConfig(f"device_name {message}", issues=(Issue("device_name", message),))
    return name
