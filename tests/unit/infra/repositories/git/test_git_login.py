"""Credentials reach git through its environment, go to one host alone, and are never quoted."""

import asyncio
import base64
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.repositories.git import login, process
from infra.repositories.git.credentials import GitCredential, KeyCredential, TokenCredential
from infra.repositories.git.login import KEYS, logging_in
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.process import run_git
from infra.settings.git import LAPTOP
from schemas.errors import HeadraceError, InvalidConfig, NotFound
from schemas.specs import CommitSpec
from tests.kit.git_server import GitServer, git_server
from tests.kit.platform import git, make_workspace

USER, TOKEN = "bot", "ghp_+/secret=="
LOGIN = f"{USER}:{TOKEN}"
BASIC = base64.b64encode(LOGIN.encode()).decode()
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nc2VjcmV0\n-----END OPENSSH PRIVATE KEY-----"
CREDENTIALS: dict[str, GitCredential] = {
    "mine": TokenCredential(USER, TOKEN),
    "other": TokenCredential(USER, "wrong"),
    "ssh": KeyCredential(KEY),
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitServer]:
    """A server that wants a login, over plain HTTP, which is allowed here only."""
    make_workspace(tmp_path / "served" / "source")
    with git_server(tmp_path / "served") as serving:
        serving.login = LOGIN
        yield serving


async def credential_of(workspace: str) -> GitCredential | None:
    return CREDENTIALS.get(workspace)


@pytest.fixture
def repositories(tmp_path: Path) -> GitRepositories:
    async def resolve(host: str, port: int) -> tuple[str, ...]:
        return ("127.0.0.1",) if host == "localhost" else ("192.0.2.1",)

    settings = replace(
        LAPTOP, addresses=replace(LAPTOP.addresses, hosts=frozenset({"example.org"}))
    )
    return GitRepositories(tmp_path / "mirrors", credential_of, settings=settings, resolve=resolve)


async def test_a_token_opens_a_private_repository(
    server: GitServer, repositories: GitRepositories
) -> None:
    url = server.url("source/.git")
    head = git(server.root / "source", "rev-parse", "HEAD")
    assert (await repositories.list_refs("mine", url)).refs == {"refs/heads/main": head}
    assert await repositories.fetch("mine", CommitSpec(url=url)) == head
    assert await repositories.check(url, CREDENTIALS["mine"]) == "main"
    assert set(server.heard) == {f"Basic {BASIC}"}


@pytest.mark.parametrize("workspace", ["other", "nobody"])
async def test_without_the_right_token_the_error_says_what_to_do(
    server: GitServer, repositories: GitRepositories, workspace: str
) -> None:
    with pytest.raises(NotFound, match="give a token or a deploy key to `headrace workspace conn"):
        await repositories.list_refs(workspace, server.url("source/.git"))


async def test_a_server_that_echoes_the_token_gets_it_into_no_error(
    server: GitServer, repositories: GitRepositories
) -> None:
    server.login, server.message = "x:y", f"you sent {{sent}} or {TOKEN}\n"
    with pytest.raises(HeadraceError) as raised:
        await repositories.list_refs("mine", server.url("source/.git"))
    told = f"{raised.value!r} {raised.value.__cause__!r} {raised.value.__cause__}"
    assert "***" in told
    assert TOKEN not in told
    assert BASIC not in told


async def test_twin_without_redaction_the_error_quotes_the_token(
    server: GitServer, repositories: GitRepositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login.GitLogin, "redact", lambda self, text: text)
    server.login, server.message = "x:y", "you sent {sent}\n"
    with pytest.raises(HeadraceError) as raised:
        await repositories.list_refs("mine", server.url("source/.git"))
    assert BASIC in str(raised.value.__cause__)


async def test_a_secret_that_is_cut_in_the_middle_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "KEPT_ERRORS", 40)
    noise = f"echo {TOKEN}{'x' * 30} >&2; echo the end >&2; exit 3"
    with pytest.raises(process.GitFailed) as raised:
        await run_git("-c", f"alias.noise=!{noise}", "noise")
    assert raised.value.stderr == "the end"


async def test_no_command_line_holds_the_token(
    server: GitServer, repositories: GitRepositories
) -> None:
    server.held, server.transferring = threading.Event(), threading.Event()
    url = server.url("source/.git")
    fetching = asyncio.create_task(repositories.fetch("mine", CommitSpec(url=url)))
    assert await asyncio.to_thread(server.transferring.wait, 60)
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes())
        except OSError:
            continue
    server.held.set()
    await fetching
    assert any(b"remote-http" in line for line in lines)
    assert not any(secret.encode() in line for line in lines for secret in (TOKEN, BASIC))


async def test_a_redirect_to_another_host_does_not_get_the_token(
    server: GitServer, repositories: GitRepositories
) -> None:
    with git_server(server.root) as elsewhere:
        elsewhere.login = LOGIN
        server.moved_to = f"http://127.0.0.1:{elsewhere.port}"
        with pytest.raises(NotFound, match="login"):
            await repositories.list_refs("mine", server.url("source/.git"))
        assert elsewhere.heard == []


async def test_twin_a_helper_of_every_host_gives_the_token_away(
    server: GitServer, repositories: GitRepositories, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_login = login._token_login

    def of_every_host(url: str, credential: TokenCredential) -> login.GitLogin:
        found = token_login(url, credential)
        variables = {**found.variables, "GIT_CONFIG_KEY_0": "credential.helper"}
        return login.GitLogin(variables=variables, secrets=found.secrets)

    monkeypatch.setattr(login, "_token_login", of_every_host)
    with git_server(server.root) as elsewhere:
        elsewhere.login = LOGIN
        server.moved_to = f"http://127.0.0.1:{elsewhere.port}"
        await repositories.list_refs("mine", server.url("source/.git"))
        assert elsewhere.heard


async def test_a_deploy_key_is_a_private_file_until_the_command_ends(
    repositories: GitRepositories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    script = tmp_path / "ssh"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -i ]; do shift; done\n'
        f'(stat -c %a "$2" "$(dirname "$2")"; cat "$2"; echo "$3 $4 [$SSH_AUTH_SOCK]") > {told}\n'
        "echo 'git@x: Permission denied (publickey).' >&2; exit 255\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(process, "SSH", str(script))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/the/agent")
    with pytest.raises(NotFound, match="deploy key"):
        await repositories.list_refs("ssh", "git@example.org:team/mine.git")
    modes, rest = told.read_text().split("\n-----BEGIN", 1)
    assert modes.split() == ["600", "700"]
    assert rest.endswith("-oIdentitiesOnly=yes -oIdentityAgent=none []\n")
    assert list((tmp_path / "mirrors").glob(f"{KEYS}*")) == []


def test_a_key_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, used = tmp_path / f"{KEYS}old", tmp_path / f"{KEYS}new"
    for folder in (left, used):
        folder.mkdir()
        (folder / "key").write_text(KEY)
    hours_ago = time.time() - 2 * login.LEFT_OVER_S
    os.utime(left, (hours_ago, hours_ago))
    with logging_in("git@x:y", KeyCredential(KEY), folder=tmp_path):
        assert not left.exists()
        assert used.exists()


@pytest.mark.parametrize(
    "credential",
    [
        TokenCredential(USER, "a\nhost=evil.example.org"),
        TokenCredential("a\nb", TOKEN),
        TokenCredential(USER, ""),
        TokenCredential(USER, "x" * 5000),
        KeyCredential("ssh-ed25519 AAAA a public key"),
    ],
)
def test_a_value_that_is_not_a_credential_is_refused(
    tmp_path: Path, credential: GitCredential
) -> None:
    with (
        pytest.raises(InvalidConfig, match="give the"),
        logging_in("https://x/y", credential, folder=tmp_path),
    ):
        pass


def test_credentials_do_not_show_their_secrets(tmp_path: Path) -> None:
    with logging_in("https://x/y", CREDENTIALS["mine"], folder=tmp_path) as found:
        shown = f"{found!r} {CREDENTIALS!r}"
    assert TOKEN not in shown
    assert BASIC not in shown
    assert "c2VjcmV0" not in shown


def test_a_token_is_not_given_to_a_path_or_to_ssh(tmp_path: Path) -> None:
    for url in (str(tmp_path), "git@example.org:team/mine.git", "ssh://git@example.org/x"):
        with logging_in(url, CREDENTIALS["mine"], folder=tmp_path) as found:
            assert found == login.NO_LOGIN


@pytest.mark.parametrize("name", ["GIT_SSL_CAINFO", "SSL_CERT_FILE"])
async def test_git_trusts_the_certificates_of_the_operator(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for each in ("GIT_SSL_CAINFO", "SSL_CERT_FILE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "/the/authority.pem")
    said = await run_git("-c", "alias.shown=!printenv GIT_SSL_CAINFO", "shown")
    assert said.decode().strip() == "/the/authority.pem"
