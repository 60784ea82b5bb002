"""Adding a workspace over HTTP while its repository does not answer."""

import pytest

from schemas.errors import RepositoryAway
from tests.kit.application import Application, KnownRepositories

pytestmark = pytest.mark.postgres


async def test_a_repository_that_is_away_is_not_added_and_nobody_waits_for_it(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run waits for its repository, and the same words here would make people wait for nothing."""

    async def away(known: KnownRepositories, url: str, credential: object = None) -> str:
        message = f"the git repository {url} does not answer now; retrying until it does"
        raise RepositoryAway(message)

    monkeypatch.setattr(KnownRepositories, "check", away)
    answer = await app.post("/workspaces", {"url": "https://git.example/acme/sums"})
    assert answer.status_code == 503
    assert "no workspace was added" in answer.json()["detail"]
    assert "add it again" in answer.json()["detail"]
    assert "retrying" not in answer.text
    assert (await app.get("/workspaces"))["workspaces"] == []
