"""Addresses that user code may connect to: `host:port`, where the host is a name or an IP address."""

import ipaddress
import re
from typing import NamedTuple

HOST = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
"""A host name in lower case. Its last part begins with a letter, so no form of an IPv4 address is
one."""
LONGEST = 300
MOST_ADDRESSES = 32
"""The maximum length of an address, and how many a config may name."""

FORM = "must be HOST:PORT with a host name or an IP address, such as 'api.example.com:443'"


class NetworkAddress(NamedTuple):
    """A host and a port. An IPv6 address has no brackets here."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The host as an IP address; None for a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


def parse_address(text: str) -> NetworkAddress:
    """Parse `host:port`. The host becomes lower case, and an IP address gets its usual form. Raises
    ValueError with a sentence about what the text must be."""
    host, _, port = text.rpartition(":") if len(text) <= LONGEST else ("", "", "")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ValueError(FORM)
    host = host.lower()
    if host.startswith("[") and host.endswith("]") and "%" not in host:
        return NetworkAddress(_usual_form(host[1:-1], ipaddress.IPv6Address), int(port))
    if HOST.fullmatch(host):
        return NetworkAddress(host, int(port))
    return NetworkAddress(_usual_form(host, ipaddress.IPv4Address), int(port))


def _usual_form(host: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> str:
    try:
        return str(kind(host))
    except ValueError as error:
        raise ValueError(FORM) from error
