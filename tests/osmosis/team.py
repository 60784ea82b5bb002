"""The people of a workspace, each with the command line of their own and a clone of one repository."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.kit.platform import Platform
from tests.osmosis import workspace
from tests.osmosis.client import Osmosis

SCOPES = {
    "owner": ["admin"],
    "member": ["submit", "control", "inference"],
    "viewer": ["read"],
}


@dataclass(frozen=True)
class Team:
    """The clients of the owner, a member and a viewer of a workspace, and their API keys. All run in
    `directory`, a worktree."""

    platform: Platform
    directory: Path
    workspace: str
    clients: Mapping[str, Osmosis]
    api_keys: Mapping[str, str]

    @property
    def owner(self) -> Osmosis:
        return self.clients["owner"]

    @property
    def member(self) -> Osmosis:
        return self.clients["member"]

    @property
    def viewer(self) -> Osmosis:
        return self.clients["viewer"]


def join(started: Platform, program: Path, root: Path, *, owner: str) -> Team:
    """Add the repository OWNER/sums as a workspace, with an API key for each role."""
    place = root / owner
    directory, bare = place / "worktree", place / owner / "sums.git"
    directory.mkdir(parents=True)
    offline = Osmosis(program, "http://127.0.0.1:9", place, directory)
    workspace.make_worktree(directory, bare, repository=f"{owner}/sums", osmosis=offline)
    name = f"{owner}-sums"
    made = started.post("/workspaces", {"url": str(bare), "name": name})
    assert made.status_code == 201, made.text
    api_keys = {}
    for role, scopes in SCOPES.items():
        body = {"name": f"{owner}-{role}", "scopes": scopes, "workspace": name, "owner": role}
        answer = started.post("/api-keys", body)
        assert answer.status_code == 201, answer.text
        api_keys[role] = answer.json()["secret"]
        (place / role).mkdir()
    clients = {
        role: Osmosis(program, started.url, place / role, directory, api_key)
        for role, api_key in api_keys.items()
    }
    return Team(started, directory, name, clients, api_keys)
