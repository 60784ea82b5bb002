"""A Gitea for the tests: the one that HEADRACE_TEST_GITEA names, else one built and started here.

HEADRACE_TEST_GITEA is `https://ADMIN:PASSWORD@host:port`, and each test makes repositories of its own
there. SSL_CERT_FILE and GIT_SSL_CAINFO name its certificate, unless a public authority signed it. If
there is no address and a Gitea cannot be built, the tests are skipped, but in CI they fail.
"""

import base64
import os
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

import httpx
import pytest

from schemas.errors import InvalidConfig
from tests.stack.gitea import ADMIN, GiteaServer, gitea_server, program

ADDRESS = "HEADRACE_TEST_GITEA"


@dataclass(frozen=True, slots=True)
class GiteaUser:
    """A user of a Gitea, with a token that may do all that the user may."""

    name: str
    token: str


@dataclass(frozen=True, slots=True)
class GiteaRepository:
    """A repository, and a clone of it that its owner pushes from."""

    gitea: "Gitea"
    owner: GiteaUser
    name: str

    @property
    def url(self) -> str:
        """The address that a person copies from the page of the repository."""
        return f"{self.gitea.url}/{self.owner.name}/{self.name}.git"

    @property
    def path(self) -> str:
        """The repository in Gitea's API."""
        return f"/repos/{quote(self.owner.name)}/{quote(self.name)}"

    def push(self, clone: Path, *refspecs: str, force: bool = False) -> None:
        """Push over HTTP, as the owner. Git gets the token through the environment."""
        basic = base64.b64encode(f"{self.owner.name}:{self.owner.token}".encode()).decode()
        subprocess.run(
            ["git", "push", "-q", *(("--force",) if force else ()), self.url, *refspecs],
            cwd=clone,
            env={
                **os.environ,
                **self.gitea.environment,
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "http.extraHeader",
                "GIT_CONFIG_VALUE_0": f"Authorization: Basic {basic}",
            },
            check=True,
            capture_output=True,
        )

    def status(self, sha: str) -> Any:
        """The combined status of a commit, with one entry for each context."""
        return self.gitea.get(f"{self.path}/commits/{sha}/status", self.owner)

    def statuses(self, sha: str) -> list[Any]:
        """All statuses that the commit ever had, newest first."""
        answer = self.gitea.get(f"{self.path}/commits/{sha}/statuses", self.owner)
        return list(answer)

    def hooks(self) -> list[Any]:
        return list(self.gitea.get(f"{self.path}/hooks", self.owner))


@dataclass
class Gitea:
    """A running Gitea, spoken to by its API. `server` is None where somebody else runs it."""

    url: str
    admin: str
    password: str
    server: GiteaServer | None = None
    api: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        own = self.server.files.certificate if self.server else None
        trusted = ssl.create_default_context(cafile=own)
        self.api = httpx.Client(base_url=f"{self.url}/api/v1", timeout=60, verify=trusted)

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which a process trusts this Gitea."""
        if self.server is None:
            return {}
        return dict.fromkeys(
            ("SSL_CERT_FILE", "GIT_SSL_CAINFO"), str(self.server.files.certificate)
        )

    def create_user(self) -> GiteaUser:
        """A new user, with a token."""
        name, password = f"u{uuid4().hex[:12]}", uuid4().hex
        body = {"username": name, "email": f"{name}@example.org", "password": password}
        as_admin = (self.admin, self.password)
        self._done("/admin/users", {**body, "must_change_password": False}, as_admin)
        asked = {"name": "all", "scopes": ["all"]}
        made = self._done(f"/users/{name}/tokens", asked, (name, password))
        return GiteaUser(name, made["sha1"])

    def create_repository(self, owner: GiteaUser, *, private: bool = False) -> GiteaRepository:
        """A new repository without commits."""
        name = f"r{uuid4().hex[:12]}"
        body = {"name": name, "private": private, "default_branch": "main"}
        answer = self.api.post("/user/repos", json=body, headers=_authorization(owner))
        assert answer.status_code == 201, answer.text
        return GiteaRepository(self, owner, name)

    def get(self, path: str, user: GiteaUser) -> Any:
        answer = self.api.get(path, headers=_authorization(user))
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
        return answer.json()

    def _done(self, path: str, body: object, auth: tuple[str, str]) -> Any:
        answer = self.api.post(path, json=body, auth=auth)
        assert answer.status_code == 201, answer.text
        return answer.json()


def _authorization(user: GiteaUser) -> dict[str, str]:
    return {"Authorization": f"token {user.token}"}


def parse_gitea(address: str) -> Gitea:
    """The Gitea at `https://ADMIN:PASSWORD@host:port`."""
    parts = urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    assert parts.username, f"{ADDRESS} holds no user: https://ADMIN:PASSWORD@host:port"
    assert parts.password, f"{ADDRESS} holds no password: https://ADMIN:PASSWORD@host:port"
    return Gitea(f"{parts.scheme}://{host}", unquote(parts.username), unquote(parts.password))


def need_gitea() -> None:
    """Skip the test when no Gitea can be built here; fail it in CI."""
    try:
        program()
    except InvalidConfig as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{error}; or name a Gitea in {ADDRESS}")


@pytest.fixture(scope="session")
def gitea() -> Iterator[Gitea]:
    """A running Gitea."""
    if address := os.environ.get(ADDRESS):
        found = parse_gitea(address)
        with found.api:
            yield found
        return
    need_gitea()
    with gitea_server() as server:
        started = Gitea(server.url, ADMIN, server.password, server)
        with started.api:
            yield started
