"""Git for hostile repositories: bare, without checkout or hooks, and with only our configuration.

User strings are checked first, never begin with a dash, and reach git only after `--`. Each commit is
fetched alone, without its history, into a repository of its own. Its tree is read with `ls-tree` and
`cat-file`, and is refused if it holds anything that could attack a checkout.
"""

import asyncio
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from infra.git import contents, refs
from infra.git.commits import fetch_alone, fetch_pushed, resolve_commit, trees_of
from infra.git.credentials import CredentialSource, GitCredential
from infra.git.failures import error_for
from infra.git.login import logging_in
from infra.git.pace import ListingPace
from infra.git.process import GitFailed, GitSource
from infra.git.smart_http import SmartHttp
from infra.ports.services import RefList
from schemas.errors import CorruptData, InvalidConfig, NotFound, Refused, RepositoryAway
from schemas.specs import CommitSpec, Push

SCHEMES = ("https", "ssh", "file")
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
SCP_LIKE = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:[A-Za-z0-9._/~-]+")

KEPT = 8
"""How many commits are kept per workspace. The most recently used ones stay. The runs of a sweep share
one commit."""

IN_USE_S, MOST_KEPT = 60.0, 64
"""A commit that was used this recently stays too, because many pushes may be examined at the same time.
Never more than MOST_KEPT commits stay."""

LEFT_OVER_S = 3600.0
"""The age at which an unfinished transfer is removed as abandoned."""

PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""The first and the longest pause before another attempt; each next pause is twice as long."""

MOST_COUNTED = 1000
"""The maximum number of repositories whose failures are counted."""

OURS = "[uploadpack]\n\tallowFilter = true\n\tallowAnySHA1InWant = true\n"
"""The configuration for the serving side when the source is a directory of this machine."""


LISTINGS_PER_S, LISTINGS_AT_ONCE = 4.0, 8
"""How many listings of refs begin in a second, and how many at once. A burst of webhooks to many
workspaces would otherwise start a git process for each, and delay the webhooks."""


class GitRepositories:
    """`infra.ports.services.Repositories`. Each workspace has a directory in `root`, with a bare
    repository for each recently used commit and one for the history. `credentials` returns the
    credential of a workspace's repository. With `smart_http`, refs are listed without git where that is
    possible."""

    def __init__(
        self,
        root: Path,
        credentials: CredentialSource | None = None,
        *,
        smart_http: SmartHttp | None = None,
    ) -> None:
        self._root = root
        self._credentials = credentials
        self._smart_http = smart_http
        self._locks: dict[str, asyncio.Lock] = {}
        self._failures: dict[str, int] = {}
        self._pace = ListingPace(per_s=LISTINGS_PER_S, burst=LISTINGS_AT_ONCE)

    async def check(self, url: str, credential: GitCredential | None = None) -> str:
        """Return the default branch. Raises Refused when `url` is not a repository, and RepositoryAway
        when it does not answer."""
        config = self._config()
        with (
            self._translating_errors(url, what=url),
            logging_in(check_url(url), credential, folder=self._root) as login,
        ):
            branch, _ = await refs.default_branch(GitSource(check_url(url), config, login))
            return branch

    async def list_refs(self, workspace: str, url: str, *, background: bool = False) -> RefList:
        """Return all branches and tags. In the `background`, git runs at low priority. Other listings
        are spread over time when there are many."""
        if not background:
            await self._pace.wait()
        with self._translating_errors(f"refs/{workspace}", what=url):
            smart = self._smart_http
            credential = await self._credential(workspace)
            if smart is not None and (found := await smart.list_refs(check_url(url), credential)):
                return found
            async with self._source(workspace, url, background=background) as source:
                listing = await refs.list_refs(source)
            if smart is not None:
                smart.leave_to_git(url)
            return listing

    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        async with self._locks.setdefault(workspace, asyncio.Lock()):
            with self._translating_errors(workspace, what=commit.url):
                async with self._source(workspace, commit.url) as source:
                    return await self._fetch(workspace, source, commit)

    async def snapshot(self, workspace: str, sha: str) -> bytes:
        with self._reading(workspace, sha) as mirror:
            return await contents.read_tar(mirror, sha)

    async def read_file(self, workspace: str, sha: str, path: str, *, most: int) -> bytes | None:
        with self._reading(workspace, sha) as mirror:
            return await contents.read_file(mirror, sha, path, most=most)

    async def message(self, workspace: str, sha: str) -> str:
        with self._reading(workspace, sha) as mirror:
            return await contents.read_message(mirror, sha)

    async def changed_paths(self, push: Push) -> tuple[str, ...] | None:
        if push.before is None or not all(map(refs.ID.fullmatch, (push.before, push.after))):
            return None
        folder = self._root / push.workspace
        before = folder / f"{push.before}.git"
        async with self._locks.setdefault(push.workspace, asyncio.Lock()):
            if before.exists() and (folder / f"{push.after}.git").exists():
                with self._reading(push.workspace, push.after, push.before) as after:
                    return await contents.changed_paths(
                        after, push.before, push.after, objects=before
                    )
            with self._translating_errors(push.workspace, what=push.url):
                async with self._source(push.workspace, push.url) as source:
                    return await self._changed_there(source, push)

    async def _changed_there(self, source: GitSource, push: Push) -> tuple[str, ...] | None:
        """Fetch the trees of both commits, and compare them."""
        folder = await asyncio.to_thread(self._folder, push.workspace)
        before, after = str(push.before), push.after
        try:
            async with trees_of(folder, source, before, after) as trees:
                return await contents.changed_paths(trees, before, after)
        except GitFailed as error:
            if refs.is_not_given_out(error):
                return None
            raise

    async def _fetch(self, workspace: str, source: GitSource, commit: CommitSpec) -> str:
        folder = await asyncio.to_thread(self._folder, workspace)
        if commit.sha is not None and commit.ref is not None:
            return await _fetch_pushed(folder, source, commit.sha, commit.ref)
        if commit.sha is not None:
            sha, branch = await resolve_commit(folder, source, commit.sha)
            wanted = sha
        else:
            branch, sha = await _head(source, commit)
            wanted = f"refs/heads/{branch}"
        if _is_kept(folder, sha):
            return sha
        try:
            return await fetch_alone(folder, source, wanted)
        except GitFailed as error:
            if wanted != sha or "unadvertised object" not in error.stderr:
                raise
            return await fetch_alone(folder, source, f"refs/heads/{branch}", sha=sha)

    @asynccontextmanager
    async def _source(
        self, workspace: str, url: str, *, background: bool = False
    ) -> AsyncIterator[GitSource]:
        """The source of a workspace, with its credential until the block ends."""
        checked, config = check_url(url), self._config()
        credential = await self._credential(workspace)
        with logging_in(checked, credential, folder=self._root) as login:
            yield GitSource(checked, config, login, background)

    async def _credential(self, workspace: str) -> GitCredential | None:
        return await self._credentials(workspace) if self._credentials else None

    def _config(self) -> Path:
        config = self._root / "config"
        if not config.exists():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            config.write_text(OURS)
        return config

    def _folder(self, workspace: str) -> Path:
        """The workspace's directory, after removing mirrors that are no longer used."""
        folder = self._root / workspace
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(self._root / f"{workspace}.git", ignore_errors=True)  # of earlier versions
        for path in folder.glob("*.partial"):
            if time.time() - path.stat().st_mtime > LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)
        commits = [path for path in folder.glob("*.git") if refs.ID.fullmatch(path.stem)]
        by_use = sorted((path.stat().st_mtime, path) for path in commits)
        for count, (used_at, path) in enumerate(reversed(by_use), start=1):
            if count > MOST_KEPT or (count > KEPT and time.time() - used_at > IN_USE_S):
                shutil.rmtree(path, ignore_errors=True)
        return folder

    @contextmanager
    def _reading(self, workspace: str, *commits: str) -> Iterator[Path]:
        """The repository of the first of these commits, while they are read. They are only copies: if
        reading fails, they are removed, and the next attempt fetches them again."""
        mirrors = [self._root / workspace / f"{sha}.git" for sha in commits]
        with self._translating_errors(workspace, what=f"mirror of workspace {workspace}"):
            try:
                for mirror in mirrors:
                    os.utime(mirror)
                yield mirrors[0]
            except (GitFailed, CorruptData, OSError):
                for mirror in mirrors:
                    shutil.rmtree(mirror, ignore_errors=True)
                raise

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
    """Check a source for git and return it: a local directory, or an https, ssh or file URL. An http
    URL is taken only for this machine, because others could read and change what it transfers.

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
    if parts.password or (parts.username and parts.scheme in ("https", "http")):
        raise InvalidConfig(
            "leave credentials out of the URL; give them to `headrace workspace connect`"
        )
    if parts.scheme == "http":
        if (parts.hostname or "") not in THIS_MACHINE:
            raise InvalidConfig(f"{url}: http is fetched only from this machine; use https")
        return url
    if parts.scheme not in SCHEMES:
        raise InvalidConfig(f"{url}: only {', '.join(SCHEMES)} URLs and local paths are fetched")
    return url


async def _head(source: GitSource, commit: CommitSpec) -> tuple[str, str]:
    """The requested branch and its newest commit. Raises NotFound, InvalidConfig."""
    if commit.branch is None:
        return await refs.default_branch(source)
    sha = await refs.newest_of(source, commit.branch)
    if sha is None:
        raise NotFound(f"there is no branch {commit.branch}; push it, or correct branch")
    return commit.branch, sha


async def _fetch_pushed(folder: Path, source: GitSource, sha: str, ref: str) -> str:
    """The commit of a push, which is fetched once. Raises Refused when its names are not safe."""
    if not refs.ID.fullmatch(sha) or not refs.is_safe_ref(ref):
        raise Refused(f"{ref[:120]!r} at {sha[:60]!r} is not a ref and a commit; push another name")
    if _is_kept(folder, sha):
        return sha
    return await fetch_pushed(folder, source, sha, ref)


def _is_kept(folder: Path, sha: str) -> bool:
    """Whether the commit is in the workspace's directory. It counts as used now."""
    mirror = folder / f"{sha}.git"
    if not mirror.exists():
        return False
    os.utime(mirror)
    return True
