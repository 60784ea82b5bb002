"""Where a repository's forge has its API, by the URL of the repository."""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from schemas.errors import InvalidConfig
from schemas.events import ForgeKind
from schemas.secrets.redact import redact

SCP_LIKE = re.compile(r"(?:[A-Za-z0-9._-]+@)?(?P<host>[A-Za-z0-9.-]+):(?P<path>(?!//)[^\s]+)")

KNOWN_HOSTS: dict[str, ForgeKind] = {
    "github.com": "github",
    "www.github.com": "github",
    "ssh.github.com": "github",
    "gitlab.com": "gitlab",
    "altssh.gitlab.com": "gitlab",
    "codeberg.org": "gitea",
    "gitea.com": "gitea",
}

PUBLIC_NAMES = {
    "www.github.com": "github.com",
    "ssh.github.com": "github.com",
    "altssh.gitlab.com": "gitlab.com",
}


@dataclass(frozen=True, slots=True)
class RepositoryAddress:
    """A repository on a forge: `origin` is `scheme://host[:port]`, and `path` its name there, for
    example `owner/name`."""

    origin: str
    path: str

    @classmethod
    def parse(cls, url: str) -> "RepositoryAddress":
        """Return the address of a repository. One that git reaches over SSH is on the same host over
        HTTPS. Raises InvalidConfig for the path of a directory, and for an address without a name."""
        scheme, host, port, path = _parts(url)
        host = PUBLIC_NAMES.get(host, host)
        name = unquote(path).strip("/").removesuffix(".git").strip("/")
        parts = name.split("/")
        if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts):
            raise InvalidConfig(
                f"{redact(url)} names no repository on a forge; use an address such as "
                "https://HOST/OWNER/NAME"
            )
        return cls(f"{scheme}://{host}{port}", name)

    @property
    def host(self) -> str:
        return self.origin.partition("://")[2]

    @property
    def owner(self) -> str:
        """The owner, without the folder under which a forge may be installed."""
        return self.path.split("/")[-2]

    @property
    def name(self) -> str:
        return self.path.split("/")[-1]

    def api(self, forge: ForgeKind) -> str:
        """Return the base URL of the API."""
        folder = "/".join(quote(part, safe="") for part in self.path.split("/")[:-2])
        match forge:
            case "github" if self.host == "github.com":
                return "https://api.github.com"
            case "github" if self.host.endswith(".ghe.com"):
                return f"https://api.{self.host}"
            case "github":
                return f"{self.origin}/api/v3"
            case "gitlab":
                return f"{self.origin}/api/v4"
            case _:
                return f"{self.origin}/{folder}{'/' if folder else ''}api/v1"


def guess_forge(url: str) -> ForgeKind | None:
    """Return the forge that the host of a URL belongs to, `none` for a directory of this machine, and
    None when the host does not say it."""
    if is_local(url):
        return "none"
    try:
        host = _parts(url)[1]
    except InvalidConfig:
        return None
    return "github" if host.endswith(".ghe.com") else KNOWN_HOSTS.get(host)


def is_local(url: str) -> bool:
    """Whether a repository is a directory of this machine."""
    return url.startswith(("/", ".", "~", "file:"))


def _parts(url: str) -> tuple[str, str, str, str]:
    """Return scheme, host, port (`:3000` or nothing) and path."""
    try:
        parts = urlsplit(url)
        host, number = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise InvalidConfig(
            f"{redact(url)} is not the address of a repository ({error}); use an address such as "
            "https://HOST/OWNER/NAME"
        ) from error
    if parts.scheme in ("http", "https") and host:
        return parts.scheme, _in_brackets(host), f":{number}" if number else "", parts.path
    if parts.scheme in ("ssh", "git+ssh") and host:
        return "https", _in_brackets(host), "", parts.path
    scp = SCP_LIKE.fullmatch(url)
    if scp is None or is_local(url):
        raise InvalidConfig(
            f"{redact(url)} is not the address of a repository on a forge; use an address such as "
            "https://HOST/OWNER/NAME"
        )
    return "https", scp["host"].lower(), "", scp["path"]


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host
