"""Decides whether a repository may be reached, and ties its host to the addresses that were checked.

Git resolves names itself. So the host is resolved here, every address is checked, and git's transport is
told to use these addresses: curl by `http.curloptResolve`, ssh by `HostName`.
"""

import ipaddress
from dataclasses import dataclass

from infra.http.checked_addresses import CheckedDialling, Resolve, resolve
from infra.repositories.git.urls import PORTS, RepositoryUrl, check_directory
from infra.settings.git import GitSettings
from schemas.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Pins:
    """Settings of git and options of its ssh that tie a host to its checked addresses."""

    settings: tuple[str, ...] = ()
    ssh: str = ""


NO_PINS = Pins()


class SourceAccess:
    """The operator's policy for repositories."""

    def __init__(self, settings: GitSettings, *, resolve: Resolve = resolve) -> None:
        self._settings = settings
        self._dialling = CheckedDialling(settings.addresses, resolve=resolve)

    def check_files(self, url: RepositoryUrl) -> None:
        """Raises InvalidConfig for a directory of this machine when these are not allowed, without a
        look at the directory, and for a path that is not a directory."""
        if url.protocol != "file":
            return
        if not self._settings.files:
            raise InvalidConfig(
                "directories of the server are not allowed as repositories; use an https or ssh URL, "
                "or let the operator add `file` to HEADRACE_GIT_ALLOW"
            )
        check_directory(url)

    async def pin(self, url: RepositoryUrl) -> Pins:
        """Return the pins of a repository's host. Raises InvalidConfig when it may not be reached, and
        RepositoryAway when its host does not resolve."""
        self.check_files(url)
        if url.protocol == "file":
            return NO_PINS
        if url.protocol == "ssh" and self._dialling.is_named(url.host):
            return NO_PINS
        found = await self._dialling.addresses(url.host, url.port)
        return _ssh_pins(url, found) if url.protocol == "ssh" else _curl_pins(url, found)


def _curl_pins(url: RepositoryUrl, addresses: tuple[str, ...]) -> Pins:
    """Curl does not resolve an address, so only a name is pinned."""
    if url.host in addresses:
        return NO_PINS
    listed = ",".join(f"[{one}]" if ":" in one else one for one in addresses)
    return Pins(settings=(f"http.curloptResolve={url.host}:{url.port}:{listed}",))


def _ssh_pins(url: RepositoryUrl, addresses: tuple[str, ...]) -> Pins:
    """The host's key is looked up by its name. A proxy would resolve names itself, so there is none."""
    address = next(
        (one for one in addresses if ipaddress.ip_address(one).version == 4), addresses[0]
    )
    alias = url.host if url.port == PORTS["ssh"] else f"[{url.host}]:{url.port}"
    return Pins(ssh=f"-oHostName={address} '-oHostKeyAlias={alias}' -oProxyCommand=none")
