"""Git, against hostile repositories: bare mirrors, no checkout, no hooks, no configuration but ours.

User strings reach git only after `--`, never with a leading dash, and only after they were checked. A
tree is materialised from `ls-tree` and `cat-file`, and refused when it holds what a checkout could be
tricked with.
"""

import asyncio
import io
import os
import re
import tarfile
import unicodedata
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from schemas.errors import InvalidConfig, NotFound, Refused
from schemas.specs import CommitSpec

SCHEMES = ("https", "ssh", "file")
SCP_LIKE = re.compile(r"^[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:[A-Za-z0-9._/~-]+$")
REF = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$")
HEX = re.compile(r"^[0-9a-f]{7,40}$")
LFS = b"version https://git-lfs.github.com/spec/"

MOST_FILES = 10_000
MOST_BYTES = 200 << 20
TIMEOUT_S = 300.0

CONFIG = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "transfer.fsckObjects=true",
    "protocol.allow=never",
    "protocol.https.allow=always",
    "protocol.ssh.allow=always",
    "protocol.file.allow=always",
    "safe.directory=*",
    "gc.auto=0",
)


class GitRepositories:
    """`infra.externals.Repositories`: one bare mirror per workspace below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._locks: dict[str, asyncio.Lock] = {}

    async def check(self, url: str) -> str:
        source = check_url(url)
        said = await _git(
            "ls-remote", "--symref", "--", source, "HEAD", failing=f"{url} is no git repository"
        )
        head = next((w for w in said.decode().split() if w.startswith("refs/heads/")), None)
        if head is None:
            raise InvalidConfig(f"{url} has no commit yet; commit something first")
        return head.removeprefix("refs/heads/")

    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        async with self._locks.setdefault(workspace, asyncio.Lock()):
            mirror = await self._mirror(workspace)
            source = check_url(commit.url)
            await _git(
                "fetch",
                "--quiet",
                "--force",
                "--prune",
                "--no-tags",
                "--no-recurse-submodules",
                "--",
                source,
                "+refs/heads/*:refs/heads/*",
                where=mirror,
                failing=f"{commit.url} cannot be fetched",
            )
            if commit.sha is not None:
                return await _pinned(mirror, commit.sha)
            branch = commit.branch or await self.check(commit.url)
            return await _head(mirror, branch)

    async def snapshot(self, workspace: str, sha: str) -> bytes:
        mirror = await self._mirror(workspace)
        listing = await _git("ls-tree", "-r", "-z", "-l", "--full-tree", sha, where=mirror)
        entries = _entries(listing)
        objects = b"".join(f"{blob}\n".encode() for _, blob, _ in entries)
        contents = await _git("cat-file", "--batch", where=mirror, send=objects)
        return await asyncio.to_thread(_archive, entries, contents)

    async def _mirror(self, workspace: str) -> Path:
        mirror = self._root / f"{workspace}.git"
        if not (mirror / "HEAD").exists():
            mirror.mkdir(parents=True, exist_ok=True, mode=0o700)
            await _git("init", "--quiet", "--bare", "--", str(mirror))
        return mirror


def check_url(url: str) -> str:
    """A source that git may be given: a local directory, or an https, ssh or file URL.

    Raises InvalidConfig for anything else, credentials in the URL included.
    """
    if not url or url.startswith("-") or any(not c.isprintable() for c in url):
        raise InvalidConfig(f"{url!r} is not a repository: give a path, or an https or ssh URL")
    if SCP_LIKE.match(url):
        return url
    parts = urlsplit(url)
    if not parts.scheme:
        path = Path(url)
        if not path.is_absolute() or not path.is_dir():
            raise InvalidConfig(f"{url} is not a directory on the server; give an absolute path")
        return str(path)
    if parts.scheme not in SCHEMES:
        raise InvalidConfig(f"{url}: only {', '.join(SCHEMES)} URLs and local paths are fetched")
    if parts.password or (parts.username and parts.scheme == "https"):
        raise InvalidConfig("leave credentials out of the URL; use a git credential helper or ssh")
    return url


async def _pinned(mirror: Path, sha: str) -> str:
    """The full sha of a pinned commit that a branch reaches. Raises NotFound."""
    missing = f"there is no commit {sha} on any branch; push it, or correct commit_sha"
    if not HEX.match(sha):
        raise InvalidConfig(f"commit_sha {sha!r} is not 7 to 40 hex digits")
    full = await _git(
        "rev-parse", "--verify", "--quiet", "--end-of-options", f"{sha}^{{commit}}",
        where=mirror, failing=missing,
    )  # fmt: skip
    found = full.decode().strip()
    if not await _git("for-each-ref", f"--contains={found}", "--count=1", where=mirror):
        raise NotFound(missing)
    return found


async def _head(mirror: Path, branch: str) -> str:
    if not REF.match(branch) or ".." in branch:
        raise InvalidConfig(f"branch {branch!r} is not a branch name")
    head = await _git(
        "rev-parse", "--verify", "--quiet", "--end-of-options", f"refs/heads/{branch}^{{commit}}",
        where=mirror, failing=f"there is no branch {branch}; push it, or correct branch",
    )  # fmt: skip
    return head.decode().strip()


def _entries(listing: bytes) -> list[tuple[PurePosixPath, str, bool]]:
    """(path, blob, executable) of a tree. Raises Refused naming the path that is not acceptable."""
    found: list[tuple[PurePosixPath, str, bool]] = []
    folded: dict[str, str] = {}
    total = 0
    for line in filter(None, listing.split(b"\0")):
        head, _, raw = line.partition(b"\t")
        mode, kind, blob, size = head.decode().split()
        name = _checked_name(raw, mode=mode, kind=kind)
        for part in (name, *(str(p) for p in PurePosixPath(name).parents)):
            key = unicodedata.normalize("NFC", part).casefold()
            if folded.setdefault(key, part) != part:
                raise Refused(
                    f"{part!r} and {folded[key]!r} are one name on some systems; rename one"
                )
        total += int(size)
        found.append((PurePosixPath(name), blob, mode == "100755"))
        if len(found) > MOST_FILES or total > MOST_BYTES:
            raise Refused(
                f"the commit holds more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB; keep data "
                "and weights out of the repository"
            )
    return found


def _checked_name(raw: bytes, *, mode: str, kind: str) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{raw!r} is no UTF-8 file name; rename it") from error
    if mode == "120000":
        raise Refused(f"{name} is a symbolic link; commit the file itself")
    if kind != "blob" or mode not in ("100644", "100755"):
        raise Refused(f"{name} is a submodule or no plain file; commit the files themselves")
    parts = name.split("/")
    if name.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\\" in name:
        raise Refused(f"{name!r} is not a path inside the repository")
    if any(part.lower().startswith(".git") and part not in HARMLESS for part in parts):
        raise Refused(f"{name}: names that begin with .git are not taken; remove it")
    return name


HARMLESS = (".gitignore", ".gitkeep", ".gitattributes", ".github")
"""Names that begin with .git and mean nothing without a checkout."""


def _archive(entries: list[tuple[PurePosixPath, str, bool]], contents: bytes) -> bytes:
    """A deterministic tar of a tree: same commit, same bytes."""
    stream = memoryview(contents)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, _, executable in entries:
            end = contents.index(b"\n", len(contents) - len(stream))
            size = int(contents[len(contents) - len(stream) : end].split()[2])
            start = end + 1
            data = contents[start : start + size]
            stream = memoryview(contents)[start + size + 1 :]
            if data.startswith(LFS):
                raise Refused(f"{path} is a Git LFS pointer; commit the file itself")
            member = tarfile.TarInfo(str(path))
            member.size = size
            member.mode = 0o755 if executable else 0o644
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


async def _git(
    *arguments: str,
    where: Path | None = None,
    send: bytes | None = None,
    failing: str | None = None,
) -> bytes:
    """Run git with our configuration and nobody else's. Raises Refused when it fails."""
    options = [item for setting in CONFIG for item in ("-c", setting)]
    process = await asyncio.create_subprocess_exec(
        "git",
        *options,
        *arguments,
        cwd=where,
        env={
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": os.environ.get("HOME", "/nonexistent"),
            "LANG": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            **{k: v for k, v in os.environ.items() if k == "SSH_AUTH_SOCK"},
        },
        stdin=asyncio.subprocess.PIPE if send is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate(send)
    except TimeoutError as error:
        raise Refused(f"{failing or 'git'}: no answer within {TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = err.decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise NotFound(f"{failing or 'git ' + arguments[0] + ' failed'} {said[0]}".strip())
    return out
