"""Sign-in with OpenID Connect: the settings `HEADRACE_OIDC_*`.

`HEADRACE_OIDC_GROUPS` says which groups of the provider give which role in which organisation, for
example `sums-admins=acme:owner,sums=acme:member`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from infra.settings.git import THIS_MACHINE

ISSUER = "HEADRACE_OIDC_ISSUER"
CLIENT = "HEADRACE_OIDC_CLIENT_ID"
SECRET = "HEADRACE_OIDC_CLIENT_SECRET"  # noqa: S105 - the name of the variable
SCOPES = "HEADRACE_OIDC_SCOPES"
CLAIM = "HEADRACE_OIDC_GROUPS_CLAIM"
GROUPS = "HEADRACE_OIDC_GROUPS"
HOURS = "HEADRACE_OIDC_HOURS"
USUAL_SCOPES, USUAL_CLAIM, USUAL_HOURS, MOST_HOURS = "openid email profile", "groups", 12, 2160
ROLES = ("owner", "member", "viewer")
"""The roles of members, the one with the most rights first."""

ORGANISATION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")
PLAIN = re.compile(r"[\x21-\x7e]{1,500}")
GROUPS_FORM = (
    "group=organisation:role pairs such as sums-admins=acme:owner,sums=acme:member, with the roles "
    f"{', '.join(ROLES)}; a comma in the name of a group is written %2C, an equals sign %3D and a per "
    "cent sign %25"
)


@dataclass(frozen=True, slots=True)
class GroupRole:
    """A group of the provider gives this role in the organisation with this name."""

    group: str
    organisation: str
    role: str


@dataclass(frozen=True, slots=True)
class OidcSettings:
    """The provider with which people sign in, and the roles that its groups give. A sign-in, and the
    API keys of programs that it approves, last for `hours`."""

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    scopes: tuple[str, ...] = tuple(USUAL_SCOPES.split())
    groups_claim: str = USUAL_CLAIM
    groups: tuple[GroupRole, ...] = ()
    hours: int = USUAL_HOURS

    @property
    def host(self) -> str:
        """The host of the provider, by which people know it."""
        return urlsplit(self.issuer).hostname or ""

    @property
    def is_local(self) -> bool:
        """Whether the provider is on this machine, where plain http is enough."""
        return self.host in THIS_MACHINE

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "OidcSettings | None":
        """Read the environment. Returns None without an issuer. Raises ValueError with the line to
        print, which never shows the secret."""
        issuer = environ.get(ISSUER) or ""
        if not issuer:
            lonely = [name for name in (CLIENT, SECRET, GROUPS) if environ.get(name)]
            if lonely:
                raise ValueError(f"{lonely[0]} is set without {ISSUER}; set both, or neither")
            return None
        if not _is_issuer(issuer):
            raise _bad(
                ISSUER,
                issuer,
                "the https:// address of the provider without a query, or an http:// address of this "
                "machine",
            )
        for name in (CLIENT, SECRET):
            if not PLAIN.fullmatch(environ.get(name) or ""):
                raise ValueError(
                    f"{name} is empty, or holds a space or a character beyond ASCII; set it to what "
                    f"the provider {issuer} gave for this installation"
                )
        return cls(
            issuer=issuer,
            client_id=environ[CLIENT],
            client_secret=environ[SECRET],
            scopes=_scopes(environ.get(SCOPES) or USUAL_SCOPES),
            groups_claim=_claim(environ.get(CLAIM) or USUAL_CLAIM),
            groups=parse_groups(environ.get(GROUPS) or ""),
            hours=_hours(environ.get(HOURS) or str(USUAL_HOURS)),
        )


def parse_groups(value: str) -> tuple[GroupRole, ...]:
    """The roles that groups give. Raises ValueError with the line to print."""
    found: list[GroupRole] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        name, _, place = part.rpartition("=")
        organisation, _, role = place.strip().partition(":")
        group = unquote(name.strip())
        if not group or role not in ROLES or not ORGANISATION.fullmatch(organisation):
            raise _bad(GROUPS, part, GROUPS_FORM)
        if any((one.group, one.organisation) == (group, organisation) for one in found):
            raise ValueError(
                f"{GROUPS} names the group {group!r} twice for the organisation {organisation}; leave "
                "one of them out"
            )
        found.append(GroupRole(group, organisation, role))
    return tuple(found)


def _is_issuer(value: str) -> bool:
    try:
        parts = urlsplit(value)
        is_good = bool(parts.hostname) and (parts.port or 1) > 0 and "@" not in parts.netloc
    except ValueError:
        return False
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in THIS_MACHINE)
    is_whole = not parts.query and not parts.fragment and bool(PLAIN.fullmatch(value))
    return is_good and is_safe and is_whole


def _scopes(value: str) -> tuple[str, ...]:
    scopes = tuple(value.split())
    if "openid" not in scopes or not all(map(SCOPE.fullmatch, scopes)):
        raise _bad(
            SCOPES, value, f"scopes with spaces between them, openid among them: {USUAL_SCOPES}"
        )
    return scopes


def _claim(value: str) -> str:
    if not PLAIN.fullmatch(value):
        raise _bad(CLAIM, value, "the name of the claim with the groups, such as groups")
    return value


def _hours(value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= MOST_HOURS:
        raise _bad(HOURS, value, f"a whole number from 1 to {MOST_HOURS}")
    return int(value)


def _bad(name: str, value: str, may: str) -> ValueError:
    return ValueError(f"{name} holds {value!r}; it may hold {may}")
