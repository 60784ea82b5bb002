"""Commits and pushes of the workspace while a trial runs: each must be synced, whatever dies."""

import random
import threading
from pathlib import Path

from tests.chaos.scene import Scene
from tests.kit.platform import eventually, git

LARGE = 1 << 20
"""Bytes of each commit: with these a fetch takes a while."""


class Syncs:
    """The workspace of one trial."""

    def __init__(self, workspace: Path, scene: Scene, index: int) -> None:
        self._workspace = workspace
        self._scene = scene
        self._draw = random.Random(index)
        self._pushes: list[threading.Thread] = []
        self._refused: list[str] = []

    def commit(self) -> None:
        """A new commit, the same for the run's code and too large to be fetched at once."""
        (self._workspace / "large.bin").write_bytes(self._draw.randbytes(LARGE))
        git(self._workspace, "add", "-A")
        git(self._workspace, "commit", "-q", "--allow-empty", "-m", "another commit")

    def push(self) -> None:
        """Have the workspace fetched, without waiting for it."""
        push = threading.Thread(target=self._post, daemon=True)
        push.start()
        self._pushes.append(push)

    def _post(self) -> None:
        body = {"url": str(self._workspace), "name": "w"}
        try:
            answer = self._scene.first.post("/workspaces", body)
        except Exception as error:
            self._refused.append(repr(error))
        else:
            if answer.status_code != 201:
                self._refused.append(answer.text)

    def wrong(self) -> str | None:
        """Push once more, and wait for all pushes; what was refused or rejected of them."""
        self.push()
        for push in self._pushes:
            push.join(300)
        if self._refused:
            return f"a push was refused: {self._refused[0][:300]}"
        head = git(self._workspace, "rev-parse", "HEAD")
        eventually(lambda: self._synced(head), within_s=60, what="the last commit is synced")
        return None

    def _synced(self, head: str) -> bool | None:
        found = self._scene.first.get("/workspaces/w")["workspace"]
        assert not found["error"], f"the workspace was rejected: {found['error'][:300]}"
        return True if found["commit_sha"] == head else None
