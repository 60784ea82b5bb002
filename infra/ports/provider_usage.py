"""The port to what evaluations have used of the models of providers."""

from typing import Protocol

from schemas.sampling import ProviderRef


class ProviderUsage(Protocol):
    """The requests to providers' models, and their price. It is durable at once, and shared by all
    workers."""

    async def begin(self, provider: ProviderRef) -> str | None:
        """Count one request of the provider's owner before it is made. Returns None, or why it may not
        be made. Requests never exceed `max_calls`. Dollars are known only afterwards, so they exceed
        `max_usd` at most by the requests that are open."""
        ...

    async def spend(self, owner: str, usd: float) -> None:
        """Add the price of an answer."""
        ...


def why_refused(provider: ProviderRef, *, calls: int, usd: float) -> str:
    """Return which bound of an owner is reached."""
    if calls >= provider.max_calls:
        return (
            f"{provider.name} was asked {calls} times, which is all that advanced.max_calls allows; "
            "raise it in another evaluation"
        )
    return (
        f"the answers of {provider.name} cost {usd:.4f} US dollars, and advanced.max_usd is "
        f"{provider.max_usd or 0:g}; raise it in another evaluation"
    )
