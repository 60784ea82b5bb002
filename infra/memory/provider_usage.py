"""The use of the models of providers, counted in memory."""

from infra.ports.provider_usage import why_refused
from schemas.sampling import ProviderRef


class MemoryProviderUsage:
    """`infra.ports.provider_usage.ProviderUsage` in memory."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._usd: dict[str, float] = {}

    async def begin(self, provider: ProviderRef) -> str | None:
        calls, usd = self._calls.get(provider.owner, 0), self._usd.get(provider.owner, 0.0)
        is_dear = provider.max_usd is not None and usd >= provider.max_usd
        if calls >= provider.max_calls or is_dear:
            return why_refused(provider, calls=calls, usd=usd)
        self._calls[provider.owner] = calls + 1
        return None

    async def spend(self, owner: str, usd: float) -> None:
        self._usd[owner] = self._usd.get(owner, 0.0) + usd
