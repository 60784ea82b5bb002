"""A team with a repository: a bare one to push to, a working copy, and a platform that follows it."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from infra.operations.local import embedded_postgres
from tests.kit.platform import Platform, eventually, git, make_workspace, platform


@dataclass
class Team:
    """A repository with a working copy, and a platform that knows it."""

    platform: Platform
    copy: Path
    bare: Path
    database: str
    workspace: str

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def push(self, ref: str, files: dict[str, str], *, message: str = "a change") -> str:
        """Commit files to a branch or tag that begins at the branch `base`, push it, and have the
        platform look. Returns the commit."""
        if ref.startswith("refs/tags/"):
            git(self.copy, "checkout", "-q", "--detach", "base")
        elif git(self.copy, "branch", "--list", ref):
            git(self.copy, "checkout", "-q", ref)
        else:
            git(self.copy, "checkout", "-q", "-b", ref, "base")
        self.write(files)
        git(self.copy, "add", "-A")
        git(self.copy, "commit", "-q", "--allow-empty", "-m", message)
        git(self.copy, "push", "-q", "origin", f"HEAD:{ref}")
        self.look()
        return git(self.copy, "rev-parse", "HEAD")

    def look(self) -> None:
        answer = self.platform.post(f"/workspaces/{self.workspace}/sync", {})
        assert answer.status_code in (200, 202), answer.text

    def events(self) -> list[tuple[str, Any]]:
        """The types and contents of all events about the workspace, in the order of the log."""
        return asyncio.run(self._events())

    async def _events(self) -> list[tuple[str, Any]]:
        connection = await asyncpg.connect(self.database)
        try:
            rows = await connection.fetch(
                "select type, data from events where run_id = $1 order by xid, position",
                self.workspace,
            )
        finally:
            await connection.close()
        return [(row["type"], json.loads(row["data"])) for row in rows]

    def statuses(self, run: str) -> list[str]:
        """The states of the commit statuses of a run, once the last one is answered."""

        def look() -> list[str] | None:
            told = [(kind, data) for kind, data in self.events() if data.get("subject") == run]
            decided = [d["status"]["state"] for k, d in told if k == "rl.status.decided"]
            ended = bool(decided) and decided[-1] != "pending"
            answered = told and told[-1][0] == "rl.status.posted"
            return decided if ended and answered else None

        return eventually(look, within_s=60, what=f"the last status of {run}", every_s=0.2)

    def find(self, kind: str, sha: str) -> Any:
        """Wait for an event of the trigger stream about a commit, and return its data."""

        def look() -> Any:
            for name, data in self.events():
                if name == f"rl.trigger.{kind}":
                    push = data.get("push") or data["origin"]["push"]
                    if push["after"] == sha:
                        return data
            return None

        return eventually(look, within_s=60, what=f"{kind} of {sha}", every_s=0.2)


@contextmanager
def team_of(
    root: Path, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> Iterator[Team]:
    """A team whose repository holds these files besides the rollout `say`. Its platform has seen the
    branch `main`, and looks only when it is told to."""
    copy, bare = make_workspace(root / "copy", files), root / "math.git"
    git(root, "clone", "-q", "--bare", str(copy), str(bare))
    git(copy, "branch", "base")
    git(copy, "remote", "add", "origin", str(bare))
    settings = {"HEADRACE_POLL_S": "0", **(environment or {})}
    with platform(root / "home", environment=settings) as started:
        started.upload("numbers")
        made = started.post("/workspaces", {"url": str(bare), "name": "math"})
        assert made.status_code == 201, made.text
        place = embedded_postgres.place_for(root / "home")
        found = Team(started, copy, bare, place.url, made.json()["workspace"]["id"])
        found.look()
        eventually(
            lambda: "rl.workspace.refs-listed" in dict(found.events()) or None,
            within_s=60,
            what="the first listing",
        )
        yield found
