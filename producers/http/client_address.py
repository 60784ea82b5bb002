"""The network address of the client of a request.

Behind a proxy, every connection comes from the proxy. The header X-Forwarded-For names the client, but
anybody can send it. So it is only believed from the proxies that the operator trusts.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

MOST_HOPS = 16
LONGEST = 64


class ClientAddresses:
    """Finds the addresses of clients. `trusted` are the networks of the proxies."""

    def __init__(self, trusted: Sequence[IPv4Network | IPv6Network]) -> None:
        self._trusted = tuple(trusted)

    def of(self, scope: Scope, headers: Headers) -> str:
        """The address of the client. When a trusted proxy sent the request, this is the last address
        in X-Forwarded-For that is not a trusted proxy."""
        client = scope.get("client")
        address = str(client[0])[:LONGEST] if client else ""
        if not self._trusted or not self._is_trusted(address):
            return address
        hops = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for hop in reversed(hops[-MOST_HOPS:]):
            named = hop.strip()[:LONGEST]
            if not _is_address(named):
                return address
            address = named
            if not self._is_trusted(named):
                return address
        return address

    def is_proxy(self, address: str) -> bool:
        """Whether this is the address of a trusted proxy."""
        return bool(self._trusted) and self._is_trusted(address)

    def _is_trusted(self, text: str) -> bool:
        try:
            address = ip_address(text)
        except ValueError:
            return False
        return any(address in network for network in self._trusted)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
