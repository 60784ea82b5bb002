"""The contract of every `infra.names.Names`: a name has one holder, and taking it again
changes nothing."""

import pytest

from infra.names import Names


class NamesSuite:
    """Bind with a fixture `names`."""

    @pytest.fixture
    def names(self) -> Names:
        raise NotImplementedError

    async def test_a_name_has_one_holder(self, names: Names) -> None:
        assert await names.take("run", "a", "1") == "1"
        assert await names.take("run", "a", "2") == "1"
        assert await names.take("run", "a", "1") == "1"
        assert await names.find_id("run", "a") == "1"
        assert await names.find_id("run", "b") is None

    async def test_kinds_do_not_meet(self, names: Names) -> None:
        await names.take("run", "a", "1")
        assert await names.take("dataset", "a", "2") == "2"
        assert await names.all_names("run") == {"a": "1"}
        assert await names.all_names("workspace") == {}

    async def test_only_the_holder_gives_a_name_back(self, names: Names) -> None:
        await names.take("run", "a", "1")
        await names.release("run", "a", "2")
        assert await names.find_id("run", "a") == "1"
        await names.release("run", "a", "1")
        assert await names.take("run", "a", "2") == "2"
