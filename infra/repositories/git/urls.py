"""The address of a repository, parsed once: its protocol, host, port and path.

Git, ssh, curl and Python each read URLs in their own way. So only plain forms are taken, which all of
them read alike.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from infra.settings.git import HOST, THIS_MACHINE
from schemas.errors import InvalidConfig

Protocol = Literal["https", "http", "ssh", "file"]

PORTS: dict[Protocol, int] = {"https": 443, "http": 80, "ssh": 22, "file": 0}
LONGEST_URL = 2048

SCP_LIKE = re.compile(
    r"(?P<user>[A-Za-z0-9._][A-Za-z0-9._-]*)@(?P<host>[A-Za-z0-9.-]+):(?P<path>[A-Za-z0-9._/~-]+)"
)
USER = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,63}")
STRANGE = re.compile(r"[\s\\<>\"'`{}|^\x00-\x20\x7f]")
"""Characters that one reader of a URL takes for the end of the host and another does not."""


@dataclass(frozen=True, slots=True)
class RepositoryUrl:
    """A checked address. `text` is what git gets. `host` is in lower case, without brackets."""

    text: str
    protocol: Protocol
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, url: str) -> "RepositoryUrl":
        """Parse a source for git: a local directory, or an https, ssh or file URL. An http URL is taken
        only for this machine, because others could read and change what it transfers. Raises
        InvalidConfig for anything else, including a URL with credentials."""
        if not url or url.startswith("-") or not url.isprintable() or len(url) > LONGEST_URL:
            raise InvalidConfig(
                f"{url[:120]!r} is not a repository: give a path, or an https or ssh URL"
            )
        if scp := SCP_LIKE.fullmatch(url):
            host = scp["host"].lower()
            return cls(url, "ssh", _checked_host(host, url), PORTS["ssh"])
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:.*", url):
            if not url.startswith("/"):
                raise InvalidConfig(f"{url} is not an absolute path on the server; give one")
            return cls(url, "file")
        return _parse_url(url)


def check_url(url: str) -> str:
    """Return a source for git. Raises InvalidConfig as `RepositoryUrl.parse` does."""
    return RepositoryUrl.parse(url).text


def is_path(url: str) -> bool:
    """Whether a source for git is a directory of this machine."""
    return url.startswith(("/", "file:"))


def check_directory(url: RepositoryUrl) -> None:
    """Raises InvalidConfig when the path of a local repository is not a directory."""
    if url.text.startswith("/") and not Path(url.text).is_dir():
        raise InvalidConfig(f"{url.text} is not a directory on the server; give an absolute path")


def directory_of(url: RepositoryUrl) -> Path:
    """The directory of a local repository."""
    if url.text.startswith("/"):
        return Path(url.text)
    return Path(unquote(urlsplit(url.text).path))


def _parse_url(url: str) -> RepositoryUrl:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise InvalidConfig(
            f"{url[:120]!r} is not a URL ({error}); use https://HOST/NAME"
        ) from error
    if parts.password or (parts.username and parts.scheme in ("https", "http")):
        raise InvalidConfig(
            "leave credentials out of the URL; give them to `headrace workspace connect`"
        )
    match parts.scheme:
        case "file" if not parts.netloc:
            return RepositoryUrl(url, "file")
        case "http" if host not in THIS_MACHINE:
            raise InvalidConfig(f"{url}: http is fetched only from this machine; use https")
        case "https" | "http" | "ssh" as protocol:
            _check_form(url, parts.netloc, parts.username, parts.query or parts.fragment)
            return RepositoryUrl(url, protocol, _checked_host(host, url), port or PORTS[protocol])
        case _:
            raise InvalidConfig(f"{url}: only https, ssh, file URLs and local paths are fetched")


def _check_form(url: str, netloc: str, user: str | None, rest: str) -> None:
    """Raises InvalidConfig for a URL that its readers could read differently."""
    if (
        not netloc.isascii()
        or STRANGE.search(url)
        or netloc.count("@") > 1
        or "%" in netloc
        or (user is not None and not USER.fullmatch(user))
        or rest
    ):
        raise InvalidConfig(
            f"{url[:120]!r} has characters that addresses of repositories do not have; use "
            "https://HOST/OWNER/NAME"
        )


def _checked_host(host: str, url: str) -> str:
    """The host. Raises InvalidConfig for one that is neither a name nor the usual form of an address."""
    is_address = re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}|[0-9a-f:]+:[0-9a-f:.]*", host)
    if not is_address and not HOST.fullmatch(host):
        raise InvalidConfig(f"{url[:120]!r} does not name a host; use https://HOST/OWNER/NAME")
    return host
