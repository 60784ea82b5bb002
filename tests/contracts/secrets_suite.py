"""What every store of secrets does."""

from abc import ABC, abstractmethod

import pytest

from infra.ports.secrets import SecretOwner, SecretStore
from schemas.errors import Conflict, InvalidConfig
from schemas.secrets import rules
from schemas.secrets.secret_value import SecretValue

WORKSPACE = SecretOwner("workspace", "w1")
ANN = SecretOwner("personal", "ann")
VALUE = SecretValue("hush-hush-1")


class SecretsSuite(ABC):
    """The contract of `infra.ports.secrets.SecretStore`."""

    @pytest.fixture
    @abstractmethod
    def store(self) -> SecretStore: ...

    async def test_a_secret_is_listed_without_its_value(self, store: SecretStore) -> None:
        assert await store.put_secret(WORKSPACE, "KEY", VALUE, by="ann")
        assert not await store.put_secret(WORKSPACE, "KEY", SecretValue("another-value"), by="bob")
        [found] = await store.all_secrets([WORKSPACE, ANN])
        assert (found.owner, found.name, found.created_by, found.updated_by) == (
            WORKSPACE,
            "KEY",
            "ann",
            "bob",
        )
        assert found.created_at <= found.updated_at
        assert found.used_at is None
        assert "another-value" not in repr(found)
        assert await store.all_secrets([ANN]) == []

    async def test_a_run_gets_its_submitters_before_its_workspaces(
        self, store: SecretStore
    ) -> None:
        await store.put_secret(WORKSPACE, "KEY", VALUE, by="a")
        await store.put_secret(WORKSPACE, "OTHER", SecretValue("of-the-workspace"), by="a")
        await store.put_secret(ANN, "KEY", SecretValue("of-ann-alone"), by="a")
        names = ("KEY", "OTHER", "NONE")
        found = await store.resolve(names, workspace="w1", submitter="ann")
        assert {name: value.reveal() for name, value in found.items()} == {
            "KEY": "of-ann-alone",
            "OTHER": "of-the-workspace",
        }
        pushed = await store.resolve(names, workspace="w1", submitter=None)
        assert pushed["KEY"].reveal() == VALUE.reveal()
        assert await store.missing(names, workspace="w1", submitter=None) == ("NONE",)
        assert await store.missing(names, workspace="w2", submitter="bob") == names
        assert await store.resolve(names, workspace=None, submitter=None) == {}

    async def test_a_use_is_noted(self, store: SecretStore) -> None:
        await store.put_secret(WORKSPACE, "KEY", VALUE, by="a")
        await store.missing(["KEY"], workspace="w1", submitter=None)
        assert (await store.all_secrets([WORKSPACE]))[0].used_at is None
        await store.resolve(["KEY"], workspace="w1", submitter=None)
        assert (await store.all_secrets([WORKSPACE]))[0].used_at is not None

    async def test_a_deleted_secret_is_gone(self, store: SecretStore) -> None:
        await store.put_secret(ANN, "KEY", VALUE, by="a")
        assert not await store.delete(WORKSPACE, "KEY")
        assert await store.delete(ANN, "KEY")
        assert not await store.delete(ANN, "KEY")
        assert await store.missing(["KEY"], workspace=None, submitter="ann") == ("KEY",)

    async def test_a_secret_of_one_run_comes_first_and_for_it_alone(
        self, store: SecretStore
    ) -> None:
        await store.put_secret(ANN, "KEY", VALUE, by="a")
        await store.give("r1", {"KEY": SecretValue("of-this-run-alone"), "MORE": VALUE})
        names, request = ("KEY", "MORE"), {"workspace": "w1", "submitter": "ann"}
        own = await store.resolve(names, **request, run="r1")
        assert {name: value.reveal() for name, value in own.items()} == {
            "KEY": "of-this-run-alone",
            "MORE": VALUE.reveal(),
        }
        for run in (None, "r2", "r1v0", ""):
            others = await store.resolve(names, **request, run=run)
            assert {name: value.reveal() for name, value in others.items()} == {
                "KEY": VALUE.reveal()
            }
        assert await store.missing(names, **request) == ("MORE",)
        assert [one.name for one in await store.all_secrets([ANN, WORKSPACE])] == ["KEY"]

    async def test_the_secrets_of_one_run_are_replaced_and_taken_back(
        self, store: SecretStore
    ) -> None:
        nobody = {"workspace": None, "submitter": None}
        await store.give("r1", {"KEY": VALUE, "OLD": VALUE})
        await store.give("r2", {"KEY": VALUE})
        await store.give("r1", {"KEY": SecretValue("another-value")})
        found = await store.resolve(("KEY", "OLD"), **nobody, run="r1")
        assert {name: value.reveal() for name, value in found.items()} == {"KEY": "another-value"}
        await store.take_back("r1")
        await store.take_back("r1")
        assert await store.resolve(("KEY",), **nobody, run="r1") == {}
        assert set(await store.resolve(("KEY",), **nobody, run="r2")) == {"KEY"}

    async def test_a_bad_value_is_not_given(self, store: SecretStore) -> None:
        for name, value in (("key", VALUE), ("KEY", SecretValue("b1!"))):
            with pytest.raises(InvalidConfig):
                await store.give("r1", {"FINE": VALUE, name: value})
        found = await store.resolve(("FINE", "KEY"), workspace=None, submitter=None, run="r1")
        assert found == {}

    async def test_a_bad_name_or_value_is_refused_and_not_shown(self, store: SecretStore) -> None:
        for name in ("key", "1KEY", "KEY\n", "K-Y", "", "K" * 65, "LD_PRELOAD", "PATH"):
            with pytest.raises(InvalidConfig):
                await store.put_secret(ANN, name, VALUE, by="a")
        for value in (
            "b1!",
            "with\0nul-inside",
            "a" * 64,
            " " * 64,
            "ab1!" * 8193,
            "\ud800abcdefg",
        ):
            with pytest.raises(InvalidConfig) as refused:
                await store.put_secret(ANN, "KEY", SecretValue(value), by="a")
            assert value not in str(refused.value)
        assert await store.all_secrets([ANN]) == []
        await store.put_secret(ANN, "KEY", SecretValue("ab1!" * 8192), by="a")

    async def test_an_owner_has_so_many_and_no_more(
        self, store: SecretStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("infra.identity.secrets.store", "infra.identity.secrets.memory"):
            monkeypatch.setattr(f"{module}.MOST_SECRETS", 3)
        assert rules.MOST_SECRETS == 100
        for number in range(3):
            await store.put_secret(ANN, f"KEY_{number}", VALUE, by="a")
        with pytest.raises(Conflict, match="headrace secret delete"):
            await store.put_secret(ANN, "KEY_3", VALUE, by="a")
        await store.put_secret(ANN, "KEY_0", VALUE, by="a")
        await store.put_secret(WORKSPACE, "KEY_3", VALUE, by="a")
