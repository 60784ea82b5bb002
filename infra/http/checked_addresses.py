"""Finds the addresses of a host that may be dialled, checked at the moment of dialling.

A name is resolved once, every address that it has is checked, and the connection goes to an address that
was checked. A name that answers with a public address first and a loopback address later (DNS rebinding)
therefore reaches nothing.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from infra.settings.git import HOST, AllowedAddresses
from schemas.errors import InvalidConfig, RepositoryAway
from schemas.text import plain

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host name. Raises OSError when it has none."""

RESOLVE_S = 15.0
MOST_ADDRESSES = 8
"""The maximum number of addresses of a host that are tried."""

_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="resolve")
"""Threads for names alone: a slow name server holds up no other work of this process."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask the resolver of this machine. Raises OSError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_S):
        return await loop.run_in_executor(_RESOLVERS, _look_up, host, port)


def _look_up(host: str, port: int) -> tuple[str, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


GIT_ADVICE = "use another repository, or let the operator allow it with HEADRACE_GIT_ALLOW"


class CheckedDialling:
    """Finds the addresses at which a host may be dialled. `advice` is what to do about an address that
    may not be dialled."""

    def __init__(
        self, allowed: AllowedAddresses, *, resolve: Resolve = resolve, advice: str = GIT_ADVICE
    ) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._advice = advice

    def is_named(self, host: str) -> bool:
        """Whether the operator allows this host by its name, whatever addresses it has."""
        return host in self._allowed.hosts

    async def addresses(self, host: str, port: int) -> tuple[str, ...]:
        """Return the addresses of a host, all of which may be dialled. Raises InvalidConfig when the
        name is not that of a host or one of its addresses is not allowed, and RepositoryAway when it
        does not resolve."""
        found = (host,) if _is_address(host) else await self._look_up(host, port)
        if not self.is_named(host):
            for address in found:
                if not self._allowed.permits(address):
                    raise InvalidConfig(
                        f"{host} has the address {address}, which is not public; {self._advice}"
                    )
        return found[:MOST_ADDRESSES]

    async def _look_up(self, host: str, port: int) -> tuple[str, ...]:
        if not HOST.fullmatch(host):
            raise InvalidConfig(
                f"{plain(host)[:120]!r} is not the name of a host; write it in lower case, without a "
                "dot at its end"
            )
        try:
            found = tuple(await self._resolve(host, port))
        except (OSError, UnicodeError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise RepositoryAway(
                f"the name {host} does not resolve now ({why}); retrying until it does"
            ) from error
        if not found:
            raise RepositoryAway(f"the name {host} has no address; retrying until it has one")
        return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
