"""The client of Gitea against a real Gitea: the parts of its contract that the stand-in cannot vouch
for."""

from collections.abc import AsyncIterator

import pytest

from infra.repositories.forge_connections import ForgeConnection
from infra.repositories.forges.api import ForgeApis
from infra.repositories.forges.forge import Forge, PushHook, ShownStatus
from infra.repositories.git.credentials import TokenCredential
from infra.settings.git import LAPTOP
from schemas.errors import Refused
from tests.kit.gitea import Gitea, GiteaRepository
from tests.kit.platform import git, make_workspace

pytestmark = pytest.mark.gitea

HOOK = PushHook("http://127.0.0.1:1/webhooks/w", "first")
PENDING = ShownStatus("headrace/w/x", "pending", "run x is in progress", "http://h.example/runs/x")


@pytest.fixture(scope="module")
def repository(gitea: Gitea) -> GiteaRepository:
    return gitea.create_repository(gitea.create_user(), private=True)


@pytest.fixture
async def apis(gitea: Gitea, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForgeApis]:
    for name, value in gitea.environment.items():
        monkeypatch.setenv(name, value)

    async def find(_: str) -> None:
        return None

    async with ForgeApis(find, public_url="http://h.example", allowed=LAPTOP.addresses) as apis:
        yield apis


@pytest.fixture
def forge(apis: ForgeApis, repository: GiteaRepository) -> Forge:
    return open_forge(apis, repository, repository.owner.token)


def open_forge(apis: ForgeApis, repository: GiteaRepository, token: str) -> Forge:
    credential = TokenCredential("git", token)
    found = apis.open(ForgeConnection("w", "gitea", repository.url, credential=credential))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def commit(repository: GiteaRepository, tmp_path_factory: pytest.TempPathFactory) -> str:
    clone = make_workspace(tmp_path_factory.mktemp("clone"))
    repository.push(clone, "main")
    return git(clone, "rev-parse", "HEAD")


async def test_access_needs_the_token(
    apis: ForgeApis, forge: Forge, repository: GiteaRepository, gitea: Gitea
) -> None:
    await forge.check()
    with pytest.raises(Refused, match="answers 401"):
        await open_forge(apis, repository, "0" * 40).check()
    stranger = gitea.create_user()
    with pytest.raises(Refused, match="write:repository"):
        await open_forge(apis, repository, stranger.token).check()


async def test_one_hook_is_left_after_each_change(
    forge: Forge, repository: GiteaRepository
) -> None:
    await forge.put_hook(PushHook("http://127.0.0.1:1/other", "s"))
    first = await forge.put_hook(HOOK)
    second = await forge.put_hook(PushHook(HOOK.url, "second"))
    assert first != second
    found = {one["config"]["url"]: one for one in repository.hooks()}
    assert len(found) == len(repository.hooks()) == 2
    made = found[HOOK.url]
    assert str(made["id"]) == second
    assert made["active"] is True
    assert {"push", "create", "delete"} <= set(made["events"])
    assert made["config"]["content_type"] == "json"
    assert await forge.delete_hook(HOOK.url) is True
    assert await forge.delete_hook(HOOK.url) is False
    assert len(repository.hooks()) == 1


async def test_a_status_is_posted_once(
    forge: Forge, repository: GiteaRepository, commit: str
) -> None:
    assert await forge.post_status(commit, PENDING) is True
    assert await forge.post_status(commit, PENDING) is False
    end = ShownStatus(PENDING.context, "success", "x" * 200, PENDING.link)
    assert await forge.post_status(commit, end) is True
    assert await forge.post_status(commit, end) is False
    [shown] = repository.status(commit)["statuses"]
    assert (shown["context"], shown["status"]) == (PENDING.context, "success")
    assert (shown["description"], shown["target_url"]) == ("x" * 140, PENDING.link)
    assert len(repository.statuses(commit)) == 2
    with pytest.raises(Refused, match="answers 4"):
        await forge.post_status("d" * 40, PENDING)
