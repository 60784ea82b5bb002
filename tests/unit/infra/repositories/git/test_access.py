"""Git and its ssh are tied to the addresses that were checked, and directories need the operator."""

from pathlib import Path

import pytest

from infra.repositories.git import process
from infra.repositories.git.access import NO_PINS, SourceAccess
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.urls import RepositoryUrl
from infra.settings.git import LAPTOP, AllowedAddresses, GitSettings
from schemas.errors import InvalidConfig, RepositoryAway
from tests.kit.platform import git, make_workspace


async def public(host: str, port: int) -> tuple[str, ...]:
    return ("2606:4700::1111", "140.82.121.3")


async def private(host: str, port: int) -> tuple[str, ...]:
    return ("10.0.0.1",)


DEFAULTS = GitSettings()


async def pins(url: str, settings: GitSettings = DEFAULTS) -> tuple[tuple[str, ...], str]:
    found = await SourceAccess(settings, resolve=public).pin(RepositoryUrl.parse(url))
    return found.settings, found.ssh


async def test_https_is_pinned_to_the_checked_addresses() -> None:
    settings, ssh = await pins("https://github.com/o/r")
    assert settings == ("http.curloptResolve=github.com:443:[2606:4700::1111],140.82.121.3",)
    assert ssh == ""
    settings, _ = await pins("https://github.com:8443/o/r")
    assert settings[0].startswith("http.curloptResolve=github.com:8443:")
    assert await pins("https://140.82.121.3/o/r") == ((), "")


@pytest.mark.parametrize(
    ("url", "alias"),
    [
        ("git@github.com:o/r.git", "github.com"),
        ("ssh://git@github.com/o/r", "github.com"),
        ("ssh://git@github.com:2222/o/r", "[github.com]:2222"),
    ],
)
async def test_ssh_is_pinned_and_looks_up_the_hosts_key_by_its_name(url: str, alias: str) -> None:
    _, ssh = await pins(url)
    assert ssh == f"-oHostName=140.82.121.3 '-oHostKeyAlias={alias}' -oProxyCommand=none"


async def test_a_host_of_the_operator_may_be_an_alias_of_ssh() -> None:
    settings = GitSettings(AllowedAddresses(hosts=frozenset({"forge"})))
    assert await pins("git@forge:o/r.git", settings) == ((), "")


@pytest.mark.parametrize(
    "url", ["https://x.org/o/r", "ssh://git@x.org/o/r", "git@x.org:o/r", "https://[::1]/o/r"]
)
async def test_a_host_with_another_address_is_refused_by_every_protocol(url: str) -> None:
    access = SourceAccess(GitSettings(), resolve=private)
    with pytest.raises(InvalidConfig, match="is not public"):
        await access.pin(RepositoryUrl.parse(url))


async def test_directories_need_the_operator_and_are_not_looked_at_before(tmp_path: Path) -> None:
    source = make_workspace(tmp_path / "source")
    closed = GitRepositories(tmp_path / "closed")
    for url in (str(source), f"file://{source}", "/nowhere/at/all"):
        with pytest.raises(InvalidConfig, match="directories of the server are not allowed"):
            await closed.check(url)
    opened = GitRepositories(tmp_path / "open", settings=LAPTOP)
    assert await opened.check(str(source)) == "main"
    assert await opened.check(f"file://{source}") == "main"
    with pytest.raises(InvalidConfig, match="is not a directory on the server"):
        await opened.check("/nowhere/at/all")


async def test_loopback_needs_the_operator(tmp_path: Path) -> None:
    closed = GitRepositories(tmp_path / "closed", settings=GitSettings(files=True))
    for url in ("http://127.0.0.1:1/x", "https://127.0.0.1:1/x", "https://[::1]:1/x"):
        with pytest.raises(InvalidConfig, match="is not public"):
            await closed.check(url)


async def test_a_git_that_would_ignore_the_pins_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_workspace(tmp_path / "source")
    repositories = GitRepositories(tmp_path / "mirrors", settings=LAPTOP)
    monkeypatch.setattr(process, "_version", None)
    monkeypatch.setattr(process, "OLDEST", (99, 0))
    with pytest.raises(RepositoryAway, match=r"is too old; install 99\.0 or newer"):
        await repositories.check(str(source))
    monkeypatch.setattr(process, "OLDEST", (2, 37))
    assert await repositories.check(str(source)) == "main"


@pytest.mark.parametrize(
    ("said", "version"),
    [("git version 2.39.5", (2, 39)), ("git version 2.9.1.windows.1", (2, 9)), ("x", (0,))],
)
def test_the_version_of_git_is_parsed(said: str, version: tuple[int, ...]) -> None:
    assert process.parse_version(said) == version


@pytest.mark.parametrize(
    "url",
    [
        "https://a\\@b/x",
        "https://a@b@c/x",
        "https://a%2eb/x",
        "https://127.1/x",
        "https://0x7f000001/x",
        "https://2130706433/x",
        "https://EXAMPLE.org./x",
        "https://größe.org/x",
        "https:///x",
        "https://x/y?z",
        "https://x/y#z",
        "https://x/ y",
        "https://x:99999/y",
        "https://[::1/y",
        "ssh://-oProxyCommand=x/y",
        "ssh://-l@x/y",
        "ssh://u:p@x/y",
        "-oProxyCommand=x@y:z",
        "git://x/y",
        "ftp://x/y",
        "ext::sh -c x",
        "fd::7",
        "file://host/x",
        "x" * 3000,
    ],
)
def test_an_ambiguous_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig):
        RepositoryUrl.parse(url)


async def test_a_local_repository_is_not_pinned(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    access = SourceAccess(LAPTOP, resolve=private)
    assert await access.pin(RepositoryUrl.parse(str(tmp_path))) == NO_PINS
