"""Issues with the address of the provider's model that an evaluation names."""

from collections.abc import Collection, Iterator

from infra.http.providers.endpoints import check_base_url, is_own_server
from infra.settings.network_policy import VARIABLE
from schemas.errors import Issue
from schemas.network import NetworkAddress
from schemas.sampling import ProviderRef


def provider_address_issues(
    provider: ProviderRef, workspace: str, allowed: Collection[NetworkAddress]
) -> Iterator[Issue]:
    """An issue if the operator does not allow this workspace to reach the provider."""
    if is_own_server(provider.base_url):
        return
    address = check_base_url(provider.base_url)
    if address not in allowed:
        yield Issue(
            "advanced.base_url",
            f"the operator does not allow workspace {workspace} to ask a model at {address}; ask for "
            f"{VARIABLE}={workspace}={address}, or use a provider",
        )
