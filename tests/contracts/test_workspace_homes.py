"""Both kinds of WorkspaceHomes keep the contract: the home of a workspace, and its repository."""

import pytest

from infra.identity.organisations import Home, MemoryHomes, Organisations, WorkspaceHomes
from infra.ports.actor import MAIN
from infra.spine.postgres.pool import Database
from tests.kit.quotas import quotas


class HomesSuite:
    """Bind with a fixture `homes`."""

    @pytest.fixture
    def homes(self) -> WorkspaceHomes:
        raise NotImplementedError

    async def test_a_workspace_keeps_its_first_home(self, homes: WorkspaceHomes) -> None:
        assert await homes.find_home("w") == Home()
        await homes.put_workspace("w", "rivers")
        await homes.put_workspace("w", MAIN)
        assert (await homes.find_home("w")).organisation == "rivers"

    async def test_a_repository_names_one_workspace_of_an_organisation(
        self, homes: WorkspaceHomes
    ) -> None:
        for workspace, organisation in (("a", "rivers"), ("b", "rivers"), ("c", "lakes")):
            await homes.put_workspace(workspace, organisation)
        await homes.propose_repository("a", "team/sums")
        await homes.propose_repository("b", "team/sums")
        await homes.propose_repository("c", "team/sums")
        await homes.propose_repository("a", "team/other")
        assert list(await homes.find_repository("team/sums", workspaces=None)) == ["a", "c"]
        assert list(await homes.find_repository("team/sums", workspaces=["b", "c"])) == ["c"]
        assert list(await homes.find_repository("team/sums", workspaces=[])) == []
        assert list(await homes.find_repository("team/other", workspaces=None)) == []

    async def test_a_repository_that_is_given_moves(self, homes: WorkspaceHomes) -> None:
        for workspace, organisation in (("a", "rivers"), ("b", "rivers"), ("c", "lakes")):
            await homes.put_workspace(workspace, organisation)
            await homes.set_repository(workspace, "team/sums")
        assert list(await homes.find_repository("team/sums", workspaces=None)) == ["b", "c"]
        assert (await homes.find_home("a")).repository is None
        await homes.set_repository("b", "lakes/sums")
        assert list(await homes.find_repository("lakes/sums", workspaces=None)) == ["b"]
        assert list(await homes.find_repository("team/sums", workspaces=None)) == ["c"]
        await homes.set_repository("b", None)
        assert list(await homes.find_repository("lakes/sums", workspaces=None)) == []


class TestMemory(HomesSuite):
    @pytest.fixture
    def homes(self) -> WorkspaceHomes:
        return MemoryHomes()


@pytest.mark.postgres
class TestPostgres(HomesSuite):
    @pytest.fixture
    def homes(self, database: Database) -> WorkspaceHomes:
        return Organisations(database, quotas(database))
