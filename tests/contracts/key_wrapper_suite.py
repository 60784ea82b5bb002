"""What every key-encryption key does."""

from abc import ABC, abstractmethod

import pytest

from infra.ports.secrets import KeyWrapper, WrappedKey
from schemas.errors import InvalidConfig

DATA_KEY = bytes(range(32))


class KeyWrapperSuite(ABC):
    """The contract of `infra.ports.secrets.KeyWrapper`."""

    @pytest.fixture
    @abstractmethod
    def wrapper(self) -> KeyWrapper: ...

    @pytest.fixture
    @abstractmethod
    def other(self) -> KeyWrapper:
        """One with another key."""

    async def test_a_wrapped_key_is_unwrapped_in_its_context(self, wrapper: KeyWrapper) -> None:
        wrapped = await wrapper.wrap(DATA_KEY, context="a/KEY")
        assert DATA_KEY not in wrapped.data
        assert await wrapper.unwrap(wrapped, context="a/KEY") == DATA_KEY
        with pytest.raises(InvalidConfig) as refused:
            await wrapper.unwrap(wrapped, context="b/KEY")
        assert DATA_KEY.hex() not in str(refused.value)

    async def test_its_id_is_that_of_what_it_wraps(self, wrapper: KeyWrapper) -> None:
        wrapped = await wrapper.wrap(DATA_KEY, context="c")
        assert wrapped.key == await wrapper.key_id()
        assert wrapped.key.isascii()
        assert len(wrapped.key) <= 255
        assert await wrapper.knows(wrapped.key)
        assert not await wrapper.knows("other:key")

    async def test_two_wrappings_differ(self, wrapper: KeyWrapper) -> None:
        first, second = [await wrapper.wrap(DATA_KEY, context="c") for _ in range(2)]
        assert first.data != second.data

    async def test_a_changed_or_cut_key_does_not_unwrap(self, wrapper: KeyWrapper) -> None:
        wrapped = await wrapper.wrap(DATA_KEY, context="c")
        changed = bytes([*wrapped.data[:-1], wrapped.data[-1] ^ 1])
        for data in (changed, wrapped.data[:-1], wrapped.data[:4]):
            with pytest.raises(InvalidConfig):
                await wrapper.unwrap(WrappedKey(wrapped.key, data), context="c")

    async def test_another_key_does_not_unwrap(
        self, wrapper: KeyWrapper, other: KeyWrapper
    ) -> None:
        wrapped = await wrapper.wrap(DATA_KEY, context="c")
        assert await other.key_id() != wrapped.key
        with pytest.raises(InvalidConfig):
            await other.unwrap(WrappedKey(await other.key_id(), wrapped.data), context="c")
