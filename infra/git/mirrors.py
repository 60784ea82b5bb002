"""Git for hostile repositories: bare, without checkout or hooks, and with only our configuration.

User strings are checked first, never begin with a dash, and reach git only after `--`. Each commit is
fetched alone, without its history, into a repository of its own. Its tree is read with `ls-tree` and
`cat-file`, and is refused if it holds anything that could attack a checkout.

Whether a branch reaches a pinned commit is read from a history without content: commits only
(`--filter=tree:0`), some hundred bytes each. A server that cannot filter sends the whole history, within
the limits on git's resources.
"""

import asyncio
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from infra.git.failures import error_for
from infra.git.process import GitFailed, GitSource, run_git
from infra.git.tree import Archive, Listing
from schemas.errors import CorruptData, InvalidConfig, NotFound, RepositoryAway
from schemas.specs import CommitSpec

SCHEMES = ("https", "ssh", "file")
SCP_LIKE = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:[A-Za-z0-9._/~-]+")
REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
HEX = re.compile(r"[0-9a-f]{7,40}")

ASK_S, FETCH_S = 120.0, 900.0
"""How many seconds a listing of refs, and a transfer, may take."""

KEPT = 8
"""How many commits are kept per workspace. The most recently used ones stay. The runs of a sweep share
one commit."""

LEFT_OVER_S = 3600.0
"""The age at which an unfinished transfer is removed as abandoned."""

PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""The first and the longest pause before another attempt; each next pause is twice as long."""

MOST_COUNTED = 1000
"""The maximum number of repositories whose failures are counted."""

TAKEN = "refs/heads/taken"
BRANCHES = "+refs/heads/*:refs/heads/*"
FETCH = ("fetch", "--quiet", "--force", "--no-tags", "--no-recurse-submodules")
OURS = "[uploadpack]\n\tallowFilter = true\n\tallowAnySHA1InWant = true\n"
"""The configuration for the serving side when the source is a directory of this machine."""


class GitRepositories:
    """`infra.ports.services.Repositories`. Each workspace has a directory in `root`, with a bare
    repository for each recently used commit and one for the history."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._locks: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, int] = {}

    async def check(self, url: str) -> str:
        """Return the default branch. Raises Refused when `url` is not a repository, and RepositoryAway
        when it does not answer."""
        with self._translating_errors(url, what=url):
            branch, _ = await self._default(self._source(url), url)
            return branch

    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        async with self._locks.setdefault(workspace, asyncio.Lock()):
            with self._translating_errors(workspace, what=commit.url):
                return await self._fetch(workspace, commit)

    async def snapshot(self, workspace: str, sha: str) -> bytes:
        mirror = self._root / workspace / f"{sha}.git"
        with self._translating_errors(workspace, what=f"mirror of workspace {workspace}"):
            try:
                return await _tar(mirror, sha)
            except (GitFailed, CorruptData, OSError):
                # This is only a copy: remove it, and the next attempt fetches it again.
                await asyncio.to_thread(shutil.rmtree, mirror, ignore_errors=True)
                raise

    async def _fetch(self, workspace: str, commit: CommitSpec) -> str:
        source = self._source(commit.url)
        folder = await asyncio.to_thread(self._folder, workspace)
        if commit.sha is not None:
            sha, branch = await _resolve_commit(folder, source, commit.sha)
            wanted = sha
        else:
            branch, sha = await self._head(source, commit)
            wanted = f"refs/heads/{branch}"
        if (mirror := folder / f"{sha}.git").exists():
            os.utime(mirror)
            return sha
        try:
            return await _fetch_alone(folder, source, wanted)
        except GitFailed as error:
            if wanted != sha or "unadvertised object" not in error.stderr:
                raise
            return await _fetch_alone(folder, source, f"refs/heads/{branch}", sha=sha)

    async def _head(self, source: GitSource, commit: CommitSpec) -> tuple[str, str]:
        """The requested branch and its newest commit. Raises NotFound, InvalidConfig."""
        if commit.branch is None:
            return await self._default(source, commit.url)
        branch = _branch(commit.branch)
        said = await run_git(
            "ls-remote", "--", source.url, f"refs/heads/{branch}", source=source, deadline_s=ASK_S
        )
        sha = _refs(said).get(f"refs/heads/{branch}")
        if sha is None:
            raise NotFound(f"there is no branch {branch}; push it, or correct branch")
        return branch, sha

    async def _default(self, source: GitSource, url: str) -> tuple[str, str]:
        """The default branch and its newest commit. Raises InvalidConfig when there is none."""
        said = await run_git(
            "ls-remote", "--symref", "--", source.url, "HEAD", source=source, deadline_s=ASK_S
        )
        words = said.decode(errors="replace").split()
        head = next((word for word in words if word.startswith("refs/heads/")), None)
        sha = _refs(said).get("HEAD")
        if head is None or sha is None:
            raise InvalidConfig(f"{url} has no commits; push a commit first")
        return _branch(head.removeprefix("refs/heads/")), sha

    def _source(self, url: str) -> GitSource:
        checked = check_url(url)
        config = self._root / "config"
        if not config.exists():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            config.write_text(OURS)
        return GitSource(checked, config)

    def _folder(self, workspace: str) -> Path:
        """The workspace's directory, after removing mirrors that are no longer used."""
        folder = self._root / workspace
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(self._root / f"{workspace}.git", ignore_errors=True)  # of earlier versions
        for path in folder.glob("*.partial"):
            if time.time() - path.stat().st_mtime > LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)
        commits = [path for path in folder.glob("*.git") if HEX.fullmatch(path.stem)]
        for path in sorted(commits, key=lambda path: path.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)
        return folder

    @contextmanager
    def _translating_errors(self, key: str, *, what: str) -> Iterator[None]:
        """Translate failures of git into Headrace's errors. The pause before the next attempt grows with
        each failure until an attempt succeeds."""
        try:
            yield
        except GitFailed as error:
            meant = error_for(error, what=what)
            if isinstance(meant, RepositoryAway):
                meant.pause_s = self._pause_s(key)
            raise meant from error
        except (OSError, CorruptData) as error:
            raise RepositoryAway(
                f"git cannot run on this machine for {what} now ({error}); retrying until it can",
                pause_s=self._pause_s(key),
            ) from error
        self._failures.pop(key, None)

    def _pause_s(self, key: str) -> float:
        if len(self._failures) > MOST_COUNTED:
            self._failures.clear()
        count: int = min(self._failures.get(key, 0) + 1, 10)
        self._failures[key] = count
        return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (count - 1))


def check_url(url: str) -> str:
    """Check a source for git and return it: a local directory, or an https, ssh or file URL.

    Raises InvalidConfig for anything else, including a URL with credentials.
    """
    if not url or url.startswith("-") or any(not c.isprintable() for c in url):
        raise InvalidConfig(f"{url!r} is not a repository: give a path, or an https or ssh URL")
    if SCP_LIKE.fullmatch(url):
        return url
    parts = urlsplit(url)
    if not parts.scheme:
        path = Path(url)
        if not path.is_absolute() or not path.is_dir():
            raise InvalidConfig(f"{url} is not a directory on the server; give an absolute path")
        return str(path)
    if parts.password or (parts.username and parts.scheme == "https"):
        raise InvalidConfig(
            "leave credentials out of the URL; use ssh, or ~/.netrc of the server's user"
        )
    if parts.scheme not in SCHEMES:
        raise InvalidConfig(f"{url}: only {', '.join(SCHEMES)} URLs and local paths are fetched")
    return url


def _branch(name: str) -> str:
    if not REF.fullmatch(name) or ".." in name:
        raise InvalidConfig(f"branch {name!r} is not a branch name")
    return name


def _refs(said: bytes) -> dict[str, str]:
    """Ref -> commit, from the output of `ls-remote`."""
    lines = (line.split("\t") for line in said.decode(errors="replace").splitlines())
    return {line[1]: line[0] for line in lines if len(line) == 2 and HEX.fullmatch(line[0])}


async def _fetch_alone(
    folder: Path, source: GitSource, wanted: str, *, sha: str | None = None
) -> str:
    """Fetch a ref or a commit into a repository of its own, and return the commit's full id. Without
    `sha` only the commit is fetched. With `sha`, for servers that only serve branches, the whole branch
    is fetched, which contains that commit."""
    partial = folder / f"{random.getrandbits(64):016x}.partial"
    try:
        await run_git("init", "--quiet", "--bare", "--template=", "--", str(partial))
        depth = ("--depth=1",) if sha is None else ()
        refspec = f"+{wanted}:{TAKEN}"
        await run_git(
            *FETCH, *depth, "--", source.url, refspec,
            where=partial, source=source, deadline_s=FETCH_S,
        )  # fmt: skip
        taken = sha or await _commit(partial, TAKEN)
        if taken is None:
            raise CorruptData(f"git fetched {wanted}, but the repository does not hold it")
        mirror = folder / f"{taken}.git"
        if not mirror.exists():
            partial.rename(mirror)
        return taken
    finally:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)


async def _resolve_commit(folder: Path, source: GitSource, sha: str) -> tuple[str, str]:
    """The full id of a pinned commit, and a branch that reaches it. Raises NotFound, InvalidConfig."""
    if not HEX.fullmatch(sha):
        raise InvalidConfig(f"commit_sha {sha!r} is not 7 to 40 hex digits")
    said = await run_git("ls-remote", "--heads", "--", source.url, source=source, deadline_s=ASK_S)
    for ref, head in _refs(said).items():
        if head == sha and ref.startswith("refs/heads/"):
            return sha, ref.removeprefix("refs/heads/")
    history = await _history(folder, source)
    found = await _commit(history, sha)
    reached = b""
    if found is not None:
        reached = await run_git(
            "for-each-ref", f"--contains={found}", "--count=1", "--format=%(refname)", "refs/heads",
            where=history,
        )  # fmt: skip
    if found is None or not reached:
        raise NotFound(f"there is no commit {sha} on any branch; push it, or correct commit_sha")
    return found, reached.decode().strip().removeprefix("refs/heads/")


async def _history(folder: Path, source: GitSource) -> Path:
    """A repository with the commits of all branches, as the source has them now."""
    history = folder / "history.git"
    remote = ("url=" + source.url, "promisor=true", "partialCloneFilter=tree:0")
    settings = (item for setting in remote for item in ("-c", f"remote.origin.{setting}"))
    try:
        if not (history / "HEAD").exists():
            await run_git("init", "--quiet", "--bare", "--template=", "--", str(history))
        await run_git(
            *settings, *FETCH, "--prune", "--filter=tree:0", "--", "origin", BRANCHES,
            where=history, source=source, deadline_s=FETCH_S,
        )  # fmt: skip
    except GitFailed:
        # A killed git may have left locks, so the next attempt starts from an empty directory.
        await asyncio.to_thread(shutil.rmtree, history, ignore_errors=True)
        raise
    return history


async def _commit(repository: Path, name: str) -> str | None:
    """The full id of a commit; None if the repository does not hold it."""
    try:
        said = await run_git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}",
            where=repository,
        )  # fmt: skip
    except GitFailed as error:
        if error.status == 1:
            return None
        raise
    return said.decode().strip()


async def _tar(mirror: Path, sha: str) -> bytes:
    listing = Listing()
    await run_git(
        "ls-tree", "-r", "-t", "-z", "-l", "--full-tree", sha, where=mirror, sink=listing.feed
    )
    archive = Archive(listing.entries)
    wanted = b"".join(f"{entry.blob}\n".encode() for entry in listing.entries)
    await run_git("cat-file", "--batch", where=mirror, send=wanted, sink=archive.feed)
    return await asyncio.to_thread(archive.close)
