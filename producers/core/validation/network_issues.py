"""Issues with the addresses that a config wants its workflow to connect to."""

from collections.abc import Collection, Iterator

from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.network import NetworkAddress, parse_address


def network_issues(
    config: RunConfig | EvalConfig, workspace: str, allowed: Collection[NetworkAddress]
) -> Iterator[Issue]:
    """An issue for each address that the operator does not allow this workspace. Those that are not
    addresses have issues of their own."""
    for index, text in enumerate(config.advanced.network):
        try:
            address = parse_address(text)
        except ValueError:
            continue
        if address not in allowed:
            yield Issue(
                f"advanced.network[{index}]",
                f"the operator does not allow workspace {workspace} to connect to {address}; ask for "
                f"HEADRACE_NETWORK_ALLOW={workspace}={address}, or leave it out",
            )
