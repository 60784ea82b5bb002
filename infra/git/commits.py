"""Fetches commits alone, and finds the branch that reaches a pinned commit.

Each commit is fetched without its history, into a bare repository of its own. Whether a branch reaches a
pinned commit is read from a history without content: commits only (`--filter=tree:0`), some hundred
bytes each. A server that cannot filter sends the whole history, within the limits on git's resources.
"""

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from infra.git.process import GitFailed, GitSource, run_git
from infra.git.refs import BRANCH, HEX, branches, is_not_given_out
from schemas.errors import CorruptData, InvalidConfig, NotFound

FETCH_S = 900.0
"""How many seconds a transfer may take."""

TAKEN = "refs/heads/taken"
BRANCHES = "+refs/heads/*:refs/heads/*"
FETCH = ("fetch", "--quiet", "--force", "--no-tags", "--no-recurse-submodules")


async def fetch_alone(
    folder: Path, source: GitSource, wanted: str, *, sha: str | None = None
) -> str:
    """Fetch a ref or a commit into a repository of its own, and return the commit's full id. Without
    `sha` only the commit is fetched. With `sha`, for servers that only serve branches, the whole branch
    is fetched, which contains that commit."""
    async with _temporary(folder) as partial:
        depth = ("--depth=1",) if sha is None else ()
        await run_git(
            *FETCH, *depth, "--", source.url, f"+{wanted}:{TAKEN}",
            where=partial, source=source, deadline_s=FETCH_S,
        )  # fmt: skip
        taken = sha or await commit_id(partial, TAKEN)
        if taken is None:
            raise CorruptData(f"git fetched {wanted}, but the repository does not hold it")
        mirror = folder / f"{taken}.git"
        if not mirror.exists():
            partial.rename(mirror)
        return taken


async def fetch_pushed(folder: Path, source: GitSource, sha: str, ref: str) -> str:
    """Fetch a commit that the repository itself listed at `ref`. A server that gives out no commit by
    its id is asked for the ref. Raises NotFound when the ref has moved on and the commit is not given
    out any more."""
    try:
        return await fetch_alone(folder, source, sha)
    except GitFailed as error:
        if not is_not_given_out(error):
            raise
    gone = NotFound(f"commit {sha} of {ref} is not there any more; push it again")
    try:
        found = await fetch_alone(folder, source, ref)
    except GitFailed as error:
        raise gone if is_not_given_out(error) else error from error
    if found != sha:
        raise gone
    return found


@contextlib.asynccontextmanager
async def trees_of(folder: Path, source: GitSource, *commits: str) -> AsyncIterator[Path]:
    """Fetch the trees of commits, without the files where the server can leave them out. All commits
    come in one transfer. The repository exists until the block ends."""
    remote = ("url=" + source.url, "promisor=true", "partialCloneFilter=blob:none")
    settings = (item for setting in remote for item in ("-c", f"remote.origin.{setting}"))
    async with _temporary(folder) as partial:
        await run_git(
            *settings, *FETCH, "--depth=1", "--filter=blob:none", "--", "origin",
            *(f"+{sha}:{TAKEN}{number}" for number, sha in enumerate(commits)),
            where=partial, source=source, deadline_s=FETCH_S,
        )  # fmt: skip
        yield partial


@contextlib.asynccontextmanager
async def _temporary(folder: Path) -> AsyncIterator[Path]:
    """An empty bare repository that is removed at the end, unless it has another name by then."""
    partial = folder / f"{random.getrandbits(64):016x}.partial"
    try:
        await run_git("init", "--quiet", "--bare", "--template=", "--", str(partial))
        yield partial
    finally:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)


async def resolve_commit(folder: Path, source: GitSource, sha: str) -> tuple[str, str]:
    """Return the full id of a pinned commit, and a branch that reaches it. Raises NotFound,
    InvalidConfig."""
    if not HEX.fullmatch(sha):
        raise InvalidConfig(f"commit_sha {sha!r} is not 7 to 40 hex digits")
    for ref, head in (await branches(source)).items():
        if head == sha:
            return sha, ref.removeprefix(BRANCH)
    history = await _history(folder, source)
    found = await commit_id(history, sha)
    reached = b""
    if found is not None:
        reached = await run_git(
            "for-each-ref", f"--contains={found}", "--count=1", "--format=%(refname)", "refs/heads",
            where=history,
        )  # fmt: skip
    if found is None or not reached:
        raise NotFound(f"there is no commit {sha} on any branch; push it, or correct commit_sha")
    return found, reached.decode().strip().removeprefix(BRANCH)


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


async def commit_id(repository: Path, name: str) -> str | None:
    """Return the full id of a commit, or None if the repository does not hold it."""
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
