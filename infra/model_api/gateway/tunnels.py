"""The proxy of a sandbox: CONNECT on its socket, to the addresses that its run may reach.

A name is resolved here, every address that it has is checked, and the connection goes to one that was
checked. So a name cannot stand for this machine or its network. An address that is not public is reached
only if the operator and the run name that very address.
"""

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Collection

from infra.http.checked_addresses import MOST_ADDRESSES, Resolve, resolve
from infra.settings.git import AllowedAddresses
from schemas.network import NetworkAddress, parse_address

MOST_TUNNELS = 64
MOST_BYTES = 4 << 30
"""How many tunnels one socket may have at the same time, and how many bytes may pass through all of
its tunnels, in both directions."""

BYTES_PER_S, BURST_BYTES = 32 << 20, 64 << 20
"""How many bytes per second pass through the tunnels of one socket, and how many at once after a
pause. The process that carries them also serves the model to other runs."""

CONNECT_S = 10.0


class TunnelRefused(Exception):
    """A tunnel cannot be opened. `status` is that of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Tunnels:
    """The tunnels of one socket: where they may lead, and how much they may carry."""

    def __init__(
        self,
        addresses: Collection[NetworkAddress],
        *,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._addresses = frozenset(addresses)
        self._resolve = resolve
        self._num = 0
        self._left = MOST_BYTES
        self._clock = clock
        self._free_at = float("-inf")

    async def open(self, target: str) -> socket.socket:
        """Connect to `target`, which is host:port. The caller calls `release` when it has
        closed the socket. Raises TunnelRefused."""
        address = self._parse(target)
        if self._num >= MOST_TUNNELS:
            raise TunnelRefused(
                503, f"at most {MOST_TUNNELS} connections may be open; close others"
            )
        self._num += 1
        try:
            return await self._dial(address)
        except BaseException:
            self._num -= 1
            raise

    def release(self) -> None:
        """Count a tunnel as closed."""
        self._num -= 1

    def spend(self, num_bytes: int) -> bool:
        """Count bytes that pass through a tunnel. Returns whether they still may."""
        self._left -= num_bytes
        began = max(self._free_at, self._clock() - BURST_BYTES / BYTES_PER_S)
        self._free_at = began + num_bytes / BYTES_PER_S
        return self._left >= 0

    def rest_s(self) -> float:
        """How long no end of a tunnel may be read, because too many bytes have passed."""
        return max(0.0, self._free_at - self._clock())

    def _parse(self, target: str) -> NetworkAddress:
        try:
            address = parse_address(target)
        except ValueError as error:
            raise TunnelRefused(400, f"the address {error}") from error
        if address not in self._addresses:
            raise TunnelRefused(
                403,
                f"this run may not connect to {address}; name it in advanced.network, which the "
                "operator must allow",
            )
        return address

    async def _dial(self, address: NetworkAddress) -> socket.socket:
        failed: OSError | None = None
        for ip in await self._check_addresses(address):
            try:
                return await _connect(ip, address.port)
            except OSError as error:
                failed = error
        raise TunnelRefused(502, f"{address} cannot be reached: {failed or 'it has no address'}")

    async def _check_addresses(self, address: NetworkAddress) -> tuple[str, ...]:
        """Return the IP addresses to connect to. One that the run names was allowed as it is."""
        if address.ip is not None:
            return (address.host,)
        named = (one.ip for one in self._addresses if one.port == address.port)
        allowed = AllowedAddresses(
            networks=tuple(ipaddress.ip_network(ip) for ip in named if ip is not None)
        )
        try:
            found = tuple(await self._resolve(address.host, address.port))
        except (OSError, UnicodeError) as error:
            raise TunnelRefused(
                502, f"the name {address.host} does not resolve: {error}"
            ) from error
        for ip in found:
            if not allowed.permits(ip):
                raise TunnelRefused(
                    403,
                    f"{address.host} has the address {ip}, which is not public; the operator and "
                    "advanced.network must name that address too",
                )
        return found[:MOST_ADDRESSES]


async def _connect(ip: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.settimeout(0)
        with contextlib.suppress(OSError):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(made, (ip, port))
    except BaseException:
        made.close()
        raise
    return made
