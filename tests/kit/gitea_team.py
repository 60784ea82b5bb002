"""A team on a real Gitea: a private repository that is connected to a platform, and a clone."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.gitea import Gitea, GiteaRepository
from tests.kit.platform import Platform, eventually
from tests.kit.pushed_workspace import PushedWorkspace, commit, make_clone


@dataclass
class GiteaTeam:
    """A private repository on Gitea that is connected to a platform, and its owner's clone."""

    repository: GiteaRepository
    clone: Path
    workspace: PushedWorkspace

    def push(self, files: dict[str, str] | None = None, *, message: str = "a change") -> str:
        """Commit and push; returns the commit."""
        sha = commit(self.clone, files, message=message)
        self.repository.push(self.clone, "main")
        return sha

    def ends(self, sha: str, *, within_s: float = 90) -> Any:
        """The status that the forge shows for the commit, once it is final. There is one context, and
        it got one final status."""

        def look() -> Any:
            shown = self.repository.status(sha)["statuses"] or []
            return shown[0] if shown and shown[0]["status"] != "pending" else None

        found = eventually(look, within_s=within_s, what=f"a final status of {sha}", every_s=0.2)
        every = self.repository.statuses(sha)
        assert {one["context"] for one in every} == {found["context"]}
        assert [one["status"] for one in every if one["status"] != "pending"] == [found["status"]]
        return found


def connect_gitea(running: Platform, repository: GiteaRepository) -> PushedWorkspace:
    """Connect it by the command that a user types, again while the server does not answer. The token is
    in a variable of the shell."""

    def connected() -> bool | None:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "producers.cli.main", "workspace", "connect"),
                *(repository.url, "--forge", "gitea", "--token-env", "FORGE_TOKEN", "--json"),
            ],
            env={**running.environment, "FORGE_TOKEN": repository.owner.token},
            capture_output=True,
            text=True,
            check=False,
        )
        assert repository.owner.token not in done.stdout + done.stderr
        if '"UNREACHABLE"' in done.stderr or '"UNAVAILABLE"' in done.stderr:
            return None
        assert done.returncode == 0, done.stderr
        return True

    eventually(connected, within_s=60, what=f"{repository.url} is connected")
    shown = running.get("/workspaces", limit=50)["workspaces"]
    [found] = [one for one in shown if one["name"] == repository.name]
    return PushedWorkspace(running, found["id"], {})


def gitea_team(gitea: Gitea, running: Platform, clone: Path) -> GiteaTeam:
    """A team whose first commit starts nothing, because it is there before it connects."""
    repository = gitea.create_repository(gitea.create_user(), private=True)
    make_clone(clone)
    repository.push(clone, "main")
    return GiteaTeam(repository, clone, connect_gitea(running, repository))
