"""The Gitea of the tests is a real forge: it guards its repositories and keeps them over a restart."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.gitea import Gitea, GiteaRepository
from tests.kit.platform import git, make_workspace

pytestmark = pytest.mark.gitea


@pytest.fixture(scope="module")
def pushed(gitea: Gitea, tmp_path_factory: pytest.TempPathFactory) -> tuple[GiteaRepository, str]:
    """A private repository with one commit, and the commit."""
    repository = gitea.create_repository(gitea.create_user(), private=True)
    clone = make_workspace(tmp_path_factory.mktemp("clone"))
    repository.push(clone, "main")
    return repository, git(clone, "rev-parse", "HEAD")


def test_a_push_with_the_token_arrives(pushed: tuple[GiteaRepository, str]) -> None:
    repository, sha = pushed
    shown = repository.status(sha)
    assert (shown["sha"], shown["total_count"]) == (sha, 0)
    assert not repository.statuses(sha)
    assert not repository.hooks()


def test_a_stranger_may_neither_push_nor_look(
    gitea: Gitea, pushed: tuple[GiteaRepository, str], tmp_path: Path
) -> None:
    repository, _ = pushed
    stranger = gitea.create_user()
    answer = gitea.api.get(repository.path, headers={"Authorization": f"token {stranger.token}"})
    assert answer.status_code == 404
    forged = replace(repository, owner=replace(repository.owner, token=stranger.token))
    with pytest.raises(subprocess.CalledProcessError):
        forged.push(make_workspace(tmp_path / "clone"), "main:other")


def test_it_does_not_run_as_root_and_keeps_everything_over_a_restart(
    gitea: Gitea, pushed: tuple[GiteaRepository, str]
) -> None:
    server = gitea.server
    if server is None:
        pytest.skip("somebody else runs this Gitea")
    assert server.user_id() != 0
    server.stop()
    server.start()
    repository, sha = pushed
    assert repository.status(sha)["sha"] == sha
