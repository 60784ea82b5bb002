"""What every record of the use of providers' models does."""

import asyncio
from abc import ABC, abstractmethod

import pytest

from infra.ports.provider_usage import ProviderUsage
from schemas.sampling import ProviderRef


def provider_of(owner: str = "e1", **bounds: float) -> ProviderRef:
    ref = ProviderRef(name="p/m", model="m", base_url="https://p/v1", owner=owner)
    return ref.model_copy(update=bounds)


class ProviderUsageSuite(ABC):
    """The contract of `infra.ports.provider_usage.ProviderUsage`. `usage` and `another` are those of
    two workers."""

    @pytest.fixture
    @abstractmethod
    def usage(self) -> ProviderUsage: ...

    @pytest.fixture
    @abstractmethod
    def another(self, usage: ProviderUsage) -> ProviderUsage: ...

    async def test_workers_share_one_bound_of_calls(
        self, usage: ProviderUsage, another: ProviderUsage
    ) -> None:
        provider = provider_of(max_calls=5)
        asked = [one.begin(provider) for one in (usage, another) for _ in range(10)]
        answers = await asyncio.gather(*asked)
        assert answers.count(None) == 5
        said = next(answer for answer in answers if answer is not None)
        assert said.startswith("p/m was asked 5 times, which is all that advanced.max_calls allows")
        assert await usage.begin(provider_of("e2", max_calls=5)) is None, "each owner has its own"

    async def test_workers_share_one_bound_of_money(
        self, usage: ProviderUsage, another: ProviderUsage
    ) -> None:
        provider = provider_of(max_usd=0.3)
        assert await usage.begin(provider) is None
        await usage.spend("e1", 0.2)
        assert await another.begin(provider) is None
        await another.spend("e1", 0.2)
        assert "cost 0.4000 US dollars, and advanced.max_usd is 0.3" in str(
            await usage.begin(provider)
        )
        assert await usage.begin(provider_of(max_usd=0.5)) is None
        assert await usage.begin(provider_of()) is None
