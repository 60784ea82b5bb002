"""A repository that tests push to, and the workspace that is connected to it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.platform import Platform, eventually, git, make_workspace, run_config

SHORT = {"training": {"rollout_batch_size": 1}, "advanced": {"max_steps": 2}}
CONFIG = "configs/training/short.toml"
TRIGGER = f'[[trigger]]\nbranches = ["main"]\nconfig = "{CONFIG}"\n'


def toml_of(**changes: Any) -> str:
    """The TOML of a short run: JSON values are TOML values here."""
    lines = []
    for section, values in run_config(**changes).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


FILES = {"headrace.toml": TRIGGER, CONFIG: toml_of(**SHORT)}
"""A push to main starts one run of two steps."""


def make_clone(directory: Path, files: dict[str, str] | None = None) -> Path:
    """A repository with one commit on main, whose trigger starts a run."""
    return make_workspace(directory, {**FILES, **(files or {})})


def make_bare(clone: Path, bare: Path) -> Path:
    """A bare copy of a clone, which becomes its `origin`."""
    git(clone.parent, "clone", "-q", "--bare", str(clone), str(bare))
    git(clone, "remote", "add", "origin", str(bare))
    return bare


def commit(clone: Path, files: dict[str, str] | None = None, *, message: str = "a change") -> str:
    """Commit these files on the current branch. Returns the commit."""
    for name, text in (files or {}).items():
        path = clone / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "--allow-empty", "-m", message)
    return git(clone, "rev-parse", "HEAD")


@dataclass(frozen=True)
class PushedWorkspace:
    """A connected workspace, as its owner sees it through the API."""

    platform: Platform
    id: str
    hook: dict[str, Any]

    @classmethod
    def connect(cls, platform: Platform, url: str, **more: str) -> "PushedWorkspace":
        """Connect a repository; `more` are fields of the request."""
        answer = platform.post("/workspaces/connect", {"url": url, **more})
        assert answer.status_code == 201, answer.text
        body = answer.json()
        return cls(platform, body["workspace"]["id"], body["hook"])

    def look(self) -> None:
        """Have the platform ask for the refs now."""
        answer = self.platform.post(f"/workspaces/{self.id}/sync", {})
        assert answer.status_code == 202, answer.text

    def info(self) -> Any:
        return self.platform.get(f"/workspaces/{self.id}")["workspace"]

    def entries(self) -> list[Any]:
        """What arrived, newest first."""
        return list(self.platform.get(f"/workspaces/{self.id}/deliveries", limit=200)["deliveries"])

    def runs_of(self, sha: str) -> list[Any]:
        """The runs of a pushed commit, as the list of deliveries shows them, each once."""
        found = {
            run["run"]: run
            for entry in self.entries()
            if entry["after"] == sha
            for run in entry["runs"]
        }
        return list(found.values())

    def wait_for_run(self, sha: str, *, within_s: float = 60) -> Any:
        """The single run of a pushed commit, once it is submitted."""

        def look() -> Any:
            found = self.runs_of(sha)
            assert len(found) <= 1, found
            return found[0] if found and found[0]["outcome"] == "submitted" else None

        return eventually(look, within_s=within_s, what=f"a run of {sha}", every_s=0.1)

    def wait_for_result(self, sha: str, text: str, *, within_s: float = 60) -> str:
        """The result of a pushed commit, once it contains `text`."""

        def look() -> str | None:
            results = [str(entry["result"]) for entry in self.entries() if entry["after"] == sha]
            return next((result for result in results if text in result), None)

        return eventually(look, within_s=within_s, what=f"{text!r} for {sha}", every_s=0.1)

    def all_runs(self) -> list[str]:
        """The names of all runs of the platform."""
        return sorted(run["name"] for run in self.platform.get("/runs", limit=200)["runs"])
