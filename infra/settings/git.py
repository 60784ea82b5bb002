"""Which repositories git may reach, and how much it may keep: `HEADRACE_GIT_ALLOW` and
`HEADRACE_GIT_QUOTA_MB`.

Public addresses are always allowed. Everything else is the operator's choice, because the server can
reach addresses and files that the users of its API cannot.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from infra.settings.vllm import BadValue

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

ALLOW = "HEADRACE_GIT_ALLOW"
QUOTA = "HEADRACE_GIT_QUOTA_MB"
QUOTA_MB, MOST_QUOTA_MB = 2048, 1 << 20

NOTHING = "none"
WORDS = ("file", "loopback", "private")
HOST = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
)
"""A host name in lower case. Its last part begins with a letter, so no form of an IPv4 address is
one."""

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

PRIVATE: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"),
    )
)
METADATA: tuple[Network, ...] = tuple(
    map(
        ipaddress.ip_network,
        ("169.254.0.0/16", "100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::/32"),
    )
)
"""Addresses of the metadata services of clouds, which give out credentials. Only a network that the
operator names contains them, never the word `private`."""

UNUSED: tuple[Network, ...] = tuple(map(ipaddress.ip_network, ("192.88.99.0/24", "3fff::/20")))
"""Networks for relays and for documentation that older versions of Python take for public ones."""

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowedAddresses:
    """The addresses that may be dialled besides public ones. A host of `hosts` may have any address."""

    loopback: bool = False
    private: bool = False
    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()

    def permits(self, address: str) -> bool:
        """Whether this IP address may be dialled. An IPv4 address inside of an IPv6 address counts
        as itself, so it cannot be hidden in one."""
        try:
            given = ipaddress.ip_address(address)
        except ValueError:
            return False
        return all(self._permits(one) for one in _reachable_by(given))

    def _permits(self, address: Address) -> bool:
        if any(address in network for network in self.networks):
            return True
        if any(address in network for network in (*METADATA, *UNUSED)):
            return False
        if address.is_loopback:
            return self.loopback
        if any(address in network for network in PRIVATE):
            return self.private
        return address.is_global and not (
            address.is_multicast
            or address.is_reserved
            or address.is_unspecified
            or address.is_link_local
            or (address.version == 6 and address.is_site_local)
        )


@dataclass(frozen=True, slots=True)
class GitSettings:
    """The addresses that git may dial, whether it may read directories of this machine, and the bytes
    that the mirrors of one workspace may have."""

    addresses: AllowedAddresses = AllowedAddresses()
    files: bool = False
    quota_bytes: int = QUOTA_MB << 20

    @classmethod
    def load(cls, environ: Mapping[str, str], *, urls: tuple[str, ...]) -> "GitSettings":
        """Read the environment. `urls` are the addresses of the API. If they are all of this machine,
        the installation has one user, who can read its files anyway: then files and loopback addresses
        are allowed unless HEADRACE_GIT_ALLOW says otherwise. Raises BadValue."""
        value = environ.get(ALLOW) or None
        if value is None:
            is_alone = all((urlsplit(url).hostname or "") in THIS_MACHINE for url in urls)
            words: tuple[str, ...] = ("file", "loopback") if is_alone else ()
        else:
            words = tuple(word.strip().lower() for word in value.split(","))
        hosts, networks = set[str](), list[Network]()
        for word in words:
            if word in WORDS or (word == NOTHING and len(words) == 1):
                continue
            if (network := _network(word)) is not None:
                networks.append(network)
            elif HOST.fullmatch(word):
                hosts.add(word)
            else:
                raise BadValue(
                    ALLOW,
                    value,
                    "none, or a list of file, loopback, private, host names and networks such as "
                    "10.1.0.0/16",
                )
        addresses = AllowedAddresses(
            loopback="loopback" in words,
            private="private" in words,
            hosts=frozenset(hosts - {NOTHING}),
            networks=tuple(networks),
        )
        return cls(addresses, "file" in words, _quota(environ.get(QUOTA)) << 20)


LAPTOP = GitSettings(AllowedAddresses(loopback=True), files=True)
"""The default of a server that listens on this machine alone."""


def _network(word: str) -> Network | None:
    try:
        return ipaddress.ip_network(word)
    except ValueError:
        return None


def _quota(value: str | None) -> int:
    if not value:
        return QUOTA_MB
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= MOST_QUOTA_MB:
        raise BadValue(QUOTA, value, f"a whole number from 1 to {MOST_QUOTA_MB}")
    return int(value)


def _reachable_by(address: Address) -> tuple[Address, ...]:
    """The addresses that packets to this one may reach: itself, or the IPv4 addresses inside of it."""
    if address.version == 4:
        return (address,)
    if address.scope_id is not None:
        return (ipaddress.IPv4Address(0),)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address.sixtofour is not None:
        return (address.sixtofour,)  # Python 3.13 counts all of 2002::/16 as not global
    if address.teredo is not None:
        return (address, *address.teredo)
    if address in NAT64:
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    return (address,)
