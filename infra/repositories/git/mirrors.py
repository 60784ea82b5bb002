"""Git for hostile repositories: bare, without checkout or hooks, and with only our configuration.

User strings are checked first, never begin with a dash, and reach git only after `--`. Each commit is
fetched alone, without its history, into a repository of its own. Its tree is read with `ls-tree` and
`cat-file`, and is refused if it holds anything that could attack a checkout.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from infra.http.checked_addresses import Resolve, resolve
from infra.ports.services import RefList
from infra.repositories.git import contents, refs
from infra.repositories.git.access import SourceAccess
from infra.repositories.git.commits import fetch_alone, fetch_pushed, resolve_commit, trees_of
from infra.repositories.git.confinement import GitConfinement
from infra.repositories.git.credentials import CredentialSource, GitCredential
from infra.repositories.git.failures import error_for
from infra.repositories.git.login import logging_in
from infra.repositories.git.pipes import check_pipes
from infra.repositories.git.process import (
    CONFINEMENT,
    GitFailed,
    GitSource,
    GitTimeout,
    check_version,
)
from infra.repositories.git.redirects import Redirects
from infra.repositories.git.smart_http import SmartHttp
from infra.repositories.git.start_pacing import StartPacing
from infra.repositories.git.storage import MirrorStorage
from infra.repositories.git.urls import RepositoryUrl, check_url, directory_of, is_path
from infra.sandbox.written_trees import has_directory, remove_tree
from infra.settings.git import GitSettings
from schemas.errors import CorruptData, NotFound, Refused, RepositoryAway, TransientError
from schemas.specs import CommitSpec, Push

T = TypeVar("T")

WORK_S = 1200.0
"""How many seconds all commands for one question to a repository may take together."""

PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""The first and the longest pause before another attempt; each next pause is twice as long."""

MOST_COUNTED = 1000
"""The maximum number of repositories whose failures are counted."""

OURS = "[uploadpack]\n\tallowFilter = true\n\tallowAnySHA1InWant = true\n"
"""The configuration for the serving side when the source is a directory of this machine."""


LISTINGS_PER_S, LISTINGS_AT_ONCE = 4.0, 8
"""How many listings of refs begin in a second, and how many at once. A burst of webhooks to many
workspaces would otherwise start a git process for each, and delay the webhooks."""

AT_ONCE, AT_ONCE_OF_ONE = 32, 4
"""How many questions to repositories are in progress at once, in all and of one workspace. A server that
answers slowly holds up its own workspace first."""

CHECKS_AT_ONCE = 16
"""How many of them are checks of repositories that are not a workspace yet. Of one server, these are
AT_ONCE_OF_ONE, so a server that never answers holds up the checks of its own repositories first."""


class GitRepositories:
    """`infra.ports.services.Repositories`. Each workspace has a directory in `root`, with a bare
    repository for each recently used commit. `credentials` returns the credential of a workspace's
    repository. `settings` say which repositories are reached, and by default these are those at public
    addresses. With `smart_http`, refs are listed without git where that is possible. Git runs inside of
    `confinement`, if there is one."""

    def __init__(
        self,
        root: Path,
        credentials: CredentialSource | None = None,
        *,
        settings: GitSettings = GitSettings(),  # noqa: B008 - it is frozen
        resolve: Resolve = resolve,
        smart_http: SmartHttp | None = None,
        confinement: GitConfinement | None = None,
    ) -> None:
        self._root = root
        self._credentials = credentials
        self._access = SourceAccess(settings, resolve=resolve)
        self._redirects = Redirects(settings.addresses, resolve=resolve)
        self._storage = MirrorStorage(root, quota_bytes=settings.quota_bytes)
        self._smart_http = smart_http
        self._confinement = confinement
        self._locks: dict[str, asyncio.Lock] = {}
        self._turns = WeakValueDictionary[str, asyncio.Semaphore]()
        self._check_turns = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._all_turns = asyncio.Semaphore(AT_ONCE)
        self._failures: dict[str, int] = {}
        self._pace = StartPacing(per_s=LISTINGS_PER_S, burst=LISTINGS_AT_ONCE)

    async def collect(self, known: Container[str] | None = None) -> int:
        """Remove what killed transfers left, mirrors beyond the quotas, and the mirrors of workspaces
        that were not used for a month, or for an hour if they are not `known` (by id). Returns how many
        workspaces were removed."""
        return await asyncio.to_thread(self._storage.collect, known)

    async def check(self, url: str, credential: GitCredential | None = None) -> str:
        """Return the default branch. Raises Refused when `url` is not a repository or may not be
        reached, and RepositoryAway when it does not answer."""
        with self._translating_errors(url, url):
            branch, _ = await self._ask(None, url, refs.default_branch, credential=credential)
            return branch

    async def list_refs(self, workspace: str, url: str, *, background: bool = False) -> RefList:
        """Return all branches and tags. In the `background`, git runs at low priority. Other listings
        are spread over time when there are many."""
        if not background:
            await self._pace.wait()
        with self._translating_errors(f"refs/{workspace}", url):
            smart, credential = self._smart_http, await self._credential(workspace)
            if smart is not None and (found := await smart.list_refs(check_url(url), credential)):
                return found
            listing = await self._ask(
                workspace, url, refs.list_refs, credential=credential, background=background
            )
            if smart is not None:
                smart.leave_to_git(url)
            return listing

    async def fetch(self, workspace: str, commit: CommitSpec) -> str:
        async with self._locks.setdefault(workspace, asyncio.Lock()):
            with self._translating_errors(workspace, commit.url):
                return await self._ask(
                    workspace,
                    commit.url,
                    lambda source: self._fetch(workspace, source, commit),
                    credential=await self._credential(workspace),
                )

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
            if has_directory(before) and has_directory(folder / f"{push.after}.git"):
                with self._reading(push.workspace, push.after, push.before) as after:
                    return await contents.changed_paths(
                        after, push.before, push.after, objects=before
                    )
            with self._translating_errors(push.workspace, push.url):
                return await self._ask(
                    push.workspace,
                    push.url,
                    lambda source: self._changed_there(source, push),
                    credential=await self._credential(push.workspace),
                )

    async def _changed_there(self, source: GitSource, push: Push) -> tuple[str, ...] | None:
        """Fetch the trees of both commits, and compare them."""
        folder = await asyncio.to_thread(self._storage.folder, push.workspace)
        before, after = str(push.before), push.after
        try:
            async with trees_of(folder, source, before, after) as trees:
                return await contents.changed_paths(trees, before, after)
        except GitFailed as error:
            if refs.is_not_given_out(error):
                return None
            raise

    async def _fetch(self, workspace: str, source: GitSource, commit: CommitSpec) -> str:
        folder = await asyncio.to_thread(self._storage.folder, workspace)
        sha = await self._fetch_into(folder, source, commit)
        try:
            await asyncio.to_thread(self._storage.check_size, folder / f"{sha}.git")
        except Refused:
            await asyncio.to_thread(remove_tree, folder / f"{sha}.git")
            raise
        return sha

    async def _fetch_into(self, folder: Path, source: GitSource, commit: CommitSpec) -> str:
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

    async def _ask(
        self,
        workspace: str | None,
        url: str,
        work: Callable[[GitSource], Awaitable[T]],
        *,
        credential: GitCredential | None,
        background: bool = False,
    ) -> T:
        """Do work with a repository that may be reached. If its server sends git elsewhere, that place
        is checked like every other one, and the work is done there. The login stays with the address
        that it was given for."""
        parsed = RepositoryUrl.parse(url)
        self._access.check_files(parsed)
        await check_version()
        config = await asyncio.to_thread(self._config)
        if parsed.protocol == "file":
            await asyncio.to_thread(check_pipes, directory_of(parsed))
        async with self._turn(workspace, parsed), _deadline():
            with self._confining(), logging_in(url, credential, folder=self._root) as login:

                async def attempt(at: RepositoryUrl) -> T:
                    source = GitSource(
                        at.text,
                        config,
                        login,
                        background,
                        protocol=at.protocol,
                        pins=await self._access.pin(at),
                        most_bytes=self._storage.most_bytes,
                    )
                    return await work(source)

                return await self._redirects.follow(parsed, credential, attempt)

    @asynccontextmanager
    async def _turn(self, workspace: str | None, url: RepositoryUrl) -> AsyncIterator[None]:
        """Wait for a turn to ask, and hold it inside the block. Without a workspace, the repository is
        only checked, and takes its turn with others of the same server."""
        key = f"{url.host}:{url.port}" if workspace is None else workspace
        turns = self._turns.setdefault(key, asyncio.Semaphore(AT_ONCE_OF_ONE))
        among_checks = self._check_turns if workspace is None else nullcontext()
        async with turns, among_checks, self._all_turns:
            yield

    async def _credential(self, workspace: str) -> GitCredential | None:
        return await self._credentials(workspace) if self._credentials else None

    def _config(self) -> Path:
        config = self._root / "config"
        if not config.exists():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            config.write_text(OURS)
        return config

    @contextmanager
    def _reading(self, workspace: str, *commits: str) -> Iterator[Path]:
        """The repository of the first of these commits, while they are read. They are only copies: if
        reading fails, they are removed, and the next attempt fetches them again."""
        mirrors = [self._root / workspace / f"{sha}.git" for sha in commits]
        with (
            self._translating_errors(workspace),
            self._confining(),
        ):
            try:
                for mirror in mirrors:
                    os.utime(mirror, follow_symlinks=False)
                yield mirrors[0]
            except (GitFailed, CorruptData, OSError):
                for mirror in mirrors:
                    remove_tree(mirror)
                raise

    @contextmanager
    def _confining(self) -> Iterator[None]:
        """Inside the block, git runs in the sandbox."""
        before = CONFINEMENT.set(self._confinement)
        try:
            yield
        finally:
            CONFINEMENT.reset(before)

    @contextmanager
    def _translating_errors(self, key: str, url: str | None = None) -> Iterator[None]:
        """Translate failures of git into Headrace's errors. The pause before the next attempt grows with
        each failure until an attempt succeeds. Without `url` the mirror is read."""
        what = url or f"mirror of workspace {key}"
        try:
            yield
        except GitFailed as error:
            meant = error_for(error, what=what, is_here=url is None or is_path(url))
            if isinstance(meant, RepositoryAway):
                meant.pause_s = self._pause_s(key)
            raise meant from error
        except RepositoryAway as error:
            if type(error) is RepositoryAway:  # a forge names its own pause
                error.pause_s = self._pause_s(key)
            raise
        except CorruptData as error:
            raise TransientError(f"git cannot use {what} ({error})") from error
        except OSError as error:
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


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    """Raises GitTimeout when the block takes more than WORK_S."""
    try:
        async with asyncio.timeout(WORK_S) as limit:
            yield
    except TimeoutError as error:
        raise (GitTimeout(WORK_S) if limit.expired() else error) from error


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
    if not has_directory(mirror):
        return False
    os.utime(mirror, follow_symlinks=False)
    return True
