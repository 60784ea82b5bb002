"""Which addresses the user code of a workspace may connect to: the setting `HEADRACE_NETWORK_ALLOW`.

It names addresses by workspace, for example
`search=api.example.com:443,10.0.0.5:8443;*=files.example.com:443`. The name `*` stands for all
workspaces. Without the setting, user code has no network.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from schemas.network import NetworkAddress, parse_address

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

VARIABLE = "HEADRACE_NETWORK_ALLOW"
ANY_WORKSPACE = "*"
FORM = "workspace=host:port[,host:port...][;workspace=...], with * for all workspaces"


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """The allowed addresses, by the name of a workspace."""

    workspaces: Mapping[str, frozenset[NetworkAddress]] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: str) -> "NetworkPolicy":
        """Parse the setting. Raises ValueError."""
        workspaces: dict[str, frozenset[NetworkAddress]] = {}
        for entry in filter(None, map(str.strip, value.split(";"))):
            name, is_set, listed = (part.strip() for part in entry.partition("="))
            addresses = frozenset(parse_address(one.strip()) for one in listed.split(","))
            if not (name and is_set) or name in workspaces:
                raise ValueError(FORM)
            workspaces[name] = addresses
        return cls(workspaces)

    def addresses_of(self, workspace: str) -> frozenset[NetworkAddress]:
        """The addresses that a workspace may have."""
        nothing = frozenset[NetworkAddress]()
        everybody = self.workspaces.get(ANY_WORKSPACE, nothing)
        return everybody | self.workspaces.get(workspace, nothing)

    def may_be_reached(self, address: NetworkAddress) -> bool:
        """Whether the operator allows this address for any workspace."""
        return any(address in allowed for allowed in self.workspaces.values())

    def networks(self, port: int) -> tuple[IpNetwork, ...]:
        """The IP addresses with this port that the operator names, as networks. A host name may stand
        for one of them, although it is not public."""
        named = (
            one.ip for allowed in self.workspaces.values() for one in allowed if one.port == port
        )
        return tuple(ipaddress.ip_network(ip) for ip in named if ip is not None)

    def reachable(self, addresses: Iterable[str]) -> frozenset[NetworkAddress]:
        """Those of the addresses of a run that the operator still allows."""
        return frozenset(filter(self.may_be_reached, map(parse_address, addresses)))


NO_NETWORK = NetworkPolicy()
"""The policy that allows nothing."""
