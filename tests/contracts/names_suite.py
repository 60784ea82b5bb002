"""The contract of every `infra.names.Names`: a name has one holder in each scope, and taking it again
changes nothing."""

import pytest

from infra.names import Names, TakenName


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
        assert await names.all_names("run") == [TakenName("a", "", "1")]
        assert await names.all_names("workspace") == []

    async def test_scopes_do_not_meet(self, names: Names) -> None:
        assert await names.take("run", "a", "1", scope="w1") == "1"
        assert await names.take("run", "a", "2", scope="w2") == "2"
        assert await names.take("run", "a", "3", scope="w1") == "1"
        assert await names.take("run", "a", "4") == "4"
        assert await names.find_id("run", "a", scope="w1") == "1"
        assert await names.find_id("run", "a", scope="w2") == "2"
        assert await names.find_id("run", "a", scope="w3") is None

    async def test_a_search_finds_the_scopes_that_it_names(self, names: Names) -> None:
        for thing, scope in (("1", "w1"), ("2", "w2"), ("3", "")):
            await names.take("run", "a", thing, scope=scope)
        await names.take("run", "b", "4", scope="w2")
        assert await names.find_holders("run", "a") == [
            TakenName("a", "w1", "1"),
            TakenName("a", "w2", "2"),
            TakenName("a", "", "3"),
        ]
        assert await names.find_holders("run", "a", scopes=["w2"]) == [TakenName("a", "w2", "2")]
        assert await names.find_holders("run", "a", scopes=[]) == []
        assert await names.all_names("run", scopes={"w2"}) == [
            TakenName("a", "w2", "2"),
            TakenName("b", "w2", "4"),
        ]
        assert await names.all_names("run", scopes=[]) == []

    async def test_only_the_holder_gives_a_name_back(self, names: Names) -> None:
        await names.take("run", "a", "1", scope="w1")
        await names.take("run", "a", "2", scope="w2")
        await names.release("run", "a", "2")
        assert await names.find_id("run", "a", scope="w1") == "1"
        assert await names.find_id("run", "a", scope="w2") is None
        await names.release("run", "a", "1")
        assert await names.take("run", "a", "3", scope="w1") == "3"
