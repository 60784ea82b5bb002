"""Issues with addresses: those that a config wants its workflow to connect to, and those of the model
provider of an evaluation and of the teacher of a run."""

from collections.abc import Collection, Iterator

from infra.model_api.providers.endpoints import check_base_url, is_own_server
from infra.settings.network_policy import VARIABLE
from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.network import NetworkAddress, parse_address
from schemas.sampling import ProviderRef


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


def provider_address_issues(
    provider: ProviderRef, key: str, workspace: str, allowed: Collection[NetworkAddress]
) -> Iterator[Issue]:
    """An issue with `key` if the operator does not allow this workspace to reach the provider. A
    teacher cannot be a provider's model, which tells no log-probabilities of given answers."""
    if is_own_server(provider.base_url):
        return
    address = check_base_url(provider.base_url)
    if address not in allowed:
        other = "name a checkpoint as advanced.teacher" if "teacher" in key else "use a provider"
        yield Issue(
            key,
            f"the operator does not allow workspace {workspace} to ask a model at {address}; ask for "
            f"{VARIABLE}={workspace}={address}, or {other}",
        )
