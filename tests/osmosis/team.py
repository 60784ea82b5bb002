"""The people of a workspace, each with the command line of their own and a clone of one repository."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

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
    """Its id."""
    clients: Mapping[str, Osmosis]
    api_keys: Mapping[str, str]

    def upload(self, name: str, content: str) -> None:
        """Register a dataset of the workspace."""
        with self.api("owner") as api:
            answer = api.post("/datasets", json={"name": name, "file_name": "rows.jsonl"})
            path = made(answer)["upload"]["path"].removeprefix("/api/v1")
            assert api.put(path, content=content.encode()).status_code == 200

    def api(self, role: str) -> httpx.Client:
        """The API with the key of a role."""
        return httpx.Client(
            base_url=f"{self.platform.url}/api/v1",
            headers={"Authorization": f"Bearer {self.api_keys[role]}"},
            timeout=30,
        )

    def ask(self, model: str) -> str:
        """The answer of a deployed model to a member, with the unmodified client of OpenAI."""
        with openai.OpenAI(
            base_url=f"{self.platform.url}/v1", api_key=self.api_keys["member"], max_retries=5
        ) as client:
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Say 3"}], max_tokens=6
            )
        return str(answer.choices[0].message.content)

    @property
    def owner(self) -> Osmosis:
        return self.clients["owner"]

    @property
    def member(self) -> Osmosis:
        return self.clients["member"]

    @property
    def viewer(self) -> Osmosis:
        return self.clients["viewer"]


def join(
    started: Platform, program: Path, root: Path, *, organisation: str, name: str = "sums"
) -> Team:
    """Add the repository acme/NAME as the workspace NAME of a new organisation, with an API key for each
    role. Everything but the organisation may have the same name elsewhere."""
    place, repository = root / organisation, f"acme/{name}"
    directory, bare = place / "worktree", place / "acme" / f"{name}.git"
    directory.mkdir(parents=True)
    offline = Osmosis(program, "http://127.0.0.1:9", place, directory)
    workspace.make_worktree(directory, bare, repository=repository, osmosis=offline)
    made(started.post("/organisations", {"name": organisation, "title": organisation}))
    added = made(
        started.post(
            "/workspaces",
            {
                "url": str(bare),
                "name": name,
                "organisation": organisation,
                "repository": repository,
            },
        )
    )
    identity = added["workspace"]["id"]
    api_keys = {}
    for role, scopes in SCOPES.items():
        body = {"name": f"{organisation}-{role}", "scopes": scopes, "owner": role}
        asked = started.post("/api-keys", {**body, "workspace": identity})
        api_keys[role] = made(asked)["secret"]
        (place / role).mkdir()
    clients = {
        role: Osmosis(program, started.url, place / role, directory, api_key)
        for role, api_key in api_keys.items()
    }
    return Team(started, directory, identity, clients, api_keys)


def made(answer: httpx.Response) -> Any:
    """The body of the response to a request that made something."""
    assert answer.status_code == 201, answer.text
    return answer.json()
