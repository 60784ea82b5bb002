"""Git inside of a sandbox reads and writes its own mirror, and nothing else of this machine."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from infra.repositories.git import confinement, process
from infra.repositories.git.confinement import GitConfinement, find_confinement
from infra.repositories.git.login import NO_LOGIN, GitLogin
from infra.repositories.git.mirrors import GitRepositories
from infra.repositories.git.process import CONFINEMENT, GitFailed, GitSource, run_git
from infra.settings.git import LAPTOP
from schemas.errors import InvalidConfig
from schemas.specs import CommitSpec, Push
from tests.kit.platform import git, make_workspace


@pytest.fixture
def confined(monkeypatch: pytest.MonkeyPatch) -> GitConfinement:
    found = find_confinement("bwrap")
    if found is None:
        pytest.skip("bubblewrap does not work here")
    return found


async def said(
    script: str, where: Path, source: GitSource | None, confined: GitConfinement | None
) -> str:
    """The output of a script that git starts."""
    token = CONFINEMENT.set(confined)
    try:
        told = await run_git("-c", f"alias.x=!{script}", "x", where=where, source=source)
    finally:
        CONFINEMENT.reset(token)
    return told.decode().strip()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "--bare", "mirror")
    (tmp_path / "config").touch()
    return tmp_path / "mirror"


def https(tmp_path: Path, login: GitLogin = NO_LOGIN) -> GitSource:
    return GitSource("https://x.org/y", tmp_path / "config", login, protocol="https")


ATTACKS = (
    "cat {outside}/secret",
    "touch {outside}/owned",
    "cat /etc/shadow",
    "cat /proc/1/environ | tr '\\0' '\\n' | grep SECRET",
    "kill -0 {pid}",
    "ls {home}/* >/dev/null",
    "touch /usr/owned",
    "unshare -U true",
    "echo x > /proc/sys/kernel/hostname",
    ": >> /proc/sys/kernel/core_pattern",
    "mount -t tmpfs x /mnt",
)


@pytest.mark.parametrize("attack", ATTACKS)
async def test_git_reaches_nothing_else(
    confined: GitConfinement,
    mirror: Path,
    tmp_path: Path,
    attack: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "of the platform")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    script = attack.format(outside=outside, pid=os.getpid(), home=outside)
    script = f'sh -c "{script}" 2>/dev/null && echo done || echo failed'
    assert await said(script, mirror, https(tmp_path), confined) == "failed"
    assert [path.name for path in outside.iterdir()] == ["secret"]


async def test_twin_without_the_sandbox_git_reaches_it(mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert await said(f"cat {tmp_path}/secret", mirror, https(tmp_path), None) == "x"


async def test_only_a_command_that_reaches_a_repository_writes_and_has_a_network(
    confined: GitConfinement, mirror: Path, tmp_path: Path
) -> None:
    write = f"touch {mirror}/x 2>/dev/null && echo done || echo failed"
    links = "ls /sys/class/net 2>/dev/null; cat /proc/net/dev | tail -n +3 | wc -l"
    assert await said(write, mirror, https(tmp_path), confined) == "done"
    assert await said(write, mirror, None, confined) == "failed"
    assert await said(links, mirror, None, confined) == "1", "the loopback interface alone"


async def test_the_login_and_the_certificates_come_along(
    confined: GitConfinement, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "known_hosts").write_text("hosts")
    key = tmp_path / "key-1"
    key.mkdir()
    (key / "key").write_text("key")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "authority.pem").write_text("authority")
    if os.geteuid() == 0:  # root may pass this directory, and has no such right inside
        os.chown(theirs, 64_731, 64_731)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_SSL_CAINFO", str(theirs / "authority.pem"))
    login = GitLogin(variables={"HEADRACE_GIT_TOKEN": "token"}, ssh="-i key", files=(key,))
    source = GitSource("git@x.org:y", tmp_path / "config", login, protocol="ssh")
    script = f"echo $(cat ~/.ssh/known_hosts {key}/key $GIT_SSL_CAINFO) $HEADRACE_GIT_TOKEN"
    assert await said(script, mirror, source, confined) == "hostskeyauthority token"


async def test_a_signal_that_ends_git_is_told_as_one(
    confined: GitConfinement, mirror: Path, tmp_path: Path
) -> None:
    with pytest.raises(GitFailed) as raised:
        await said("kill -9 $PPID", mirror, https(tmp_path), confined)
    assert raised.value.status == -signal.SIGKILL


async def test_git_and_its_children_end_at_the_deadline(
    confined: GitConfinement, mirror: Path, tmp_path: Path
) -> None:
    CONFINEMENT.set(confined)
    mark = f"12{os.getpid()}"
    with pytest.raises(process.GitTimeout):
        await run_git(
            "-c", f"alias.x=!sleep {mark} & sleep {mark}", "x", where=mirror, deadline_s=0.5
        )
    async with asyncio.timeout(30):
        while any(mark.encode() in line for line in _command_lines()):
            await asyncio.sleep(0.02)


def _command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found


async def test_a_repository_is_read_as_without_a_sandbox(
    confined: GitConfinement, tmp_path: Path
) -> None:
    source = make_workspace(tmp_path / "source")
    before = git(source, "rev-parse", "HEAD")
    (source / "more").write_text("x")
    git(source, "add", "-A")
    git(source, "commit", "-q", "-m", "more")
    after = git(source, "rev-parse", "HEAD")
    push = Push(
        workspace="w",
        workspace_name="w",
        url=str(source),
        number=1,
        ref="refs/heads/main",
        before=before,
        after=after,
    )
    results = []
    for name, sandbox in (("plain", None), ("confined", confined)):
        repositories = GitRepositories(tmp_path / name, settings=LAPTOP, confinement=sandbox)
        spec = CommitSpec(url=str(source))
        assert await repositories.fetch("w", CommitSpec(url=str(source), sha=before)) == before
        results.append(
            (
                await repositories.fetch("w", spec),
                await repositories.snapshot("w", after),
                await repositories.message("w", after),
                await repositories.read_file("w", after, "more", most=10),
                await repositories.changed_paths(push),
                await repositories.list_refs("w", str(source)),
            )
        )
    assert results[0] == results[1]
    assert results[0][4] == ("more",)


def test_without_bubblewrap_git_has_its_limits_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Path:
        raise InvalidConfig("bubblewrap does not work here; install it")

    monkeypatch.setattr(confinement, "find_bubblewrap", fails)
    assert find_confinement("bwrap") is None
    assert "git runs without a sandbox: bubblewrap does not work here" in caplog.text
    assert find_confinement("process-trusted") is None
