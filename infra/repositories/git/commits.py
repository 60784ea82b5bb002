"""Fetches commits alone, and finds the branch that reaches a pinned commit.

Each commit is fetched without its history, into a bare repository of its own. Whether a branch reaches a
pinned commit is read from a history without content: commits only (`--filter=tree:0`), some hundred
bytes each, in steps that end at a depth. A server that cannot filter sends the content too, within the
limits on git's resources.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from infra.repositories.git.process import GitFailed, GitSource, run_git
from infra.repositories.git.refs import BRANCH, HEX, branches, is_not_given_out
from infra.sandbox.written_trees import has_directory, has_file, remove_tree
from schemas.errors import CorruptData, InvalidConfig, NotFound

FETCH_S = 900.0
"""How many seconds a transfer may take."""

DEPTHS = (50, 1000, 20_000, 200_000)
"""How many commits of each branch are looked at for a pinned commit, step by step."""

TAKEN = "refs/heads/taken"
FETCH = ("fetch", "--quiet", "--force", "--no-tags", "--no-recurse-submodules")


async def fetch_alone(
    folder: Path, source: GitSource, wanted: str, *, sha: str | None = None
) -> str:
    """Fetch a ref or a commit into a repository of its own, and return the commit's full id. Without
    `sha` only the commit is fetched. With `sha`, for servers that only serve branches, as much of the
    branch is fetched as contains that commit."""
    async with _temporary(folder) as partial:
        for depth in (1,) if sha is None else DEPTHS:
            await run_git(
                *FETCH, f"--depth={depth}", "--", source.url, f"+{wanted}:{TAKEN}",
                where=partial, source=source, deadline_s=FETCH_S,
            )  # fmt: skip
            taken = await commit_id(partial, sha or TAKEN)
            if taken is not None or not _is_shallow(partial):
                break
        if taken is None:
            raise CorruptData(f"git fetched {wanted}, but the repository does not hold it")
        mirror = folder / f"{taken}.git"
        if not has_directory(mirror):
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
        await asyncio.to_thread(remove_tree, partial)


async def resolve_commit(folder: Path, source: GitSource, sha: str) -> tuple[str, str]:
    """Return the full id of a pinned commit, and a branch that reaches it. Raises NotFound,
    InvalidConfig."""
    if not HEX.fullmatch(sha):
        raise InvalidConfig(f"commit_sha {sha!r} is not 7 to 40 hex digits")
    heads = await branches(source)
    for ref, head in heads.items():
        if head == sha:
            return sha, ref.removeprefix(BRANCH)
    names = sorted(heads)
    async with _temporary(folder) as history:
        for depth in DEPTHS if names else ():
            await _deepen(history, source, names, depth=depth)
            found = await commit_id(history, sha)
            number = await _number_of_branch(history, found) if found else None
            if found is not None and number is not None:
                return found, names[number].removeprefix(BRANCH)
            if not _is_shallow(history):
                break
    raise NotFound(
        f"there is no commit {sha} on any branch (of each the newest {DEPTHS[-1]} commits count); push "
        "it, or correct commit_sha"
    )


async def _deepen(history: Path, source: GitSource, names: Sequence[str], *, depth: int) -> None:
    """Fetch the newest commits of branches. The branches are numbered there, so that their names cannot
    contradict each other. No other ref is fetched, whatever the server lists by now."""
    remote = ("url=" + source.url, "promisor=true", "partialCloneFilter=tree:0")
    settings = (item for setting in remote for item in ("-c", f"remote.origin.{setting}"))
    wanted = (f"+{name}:{TAKEN}{number}\n" for number, name in enumerate(names))
    await run_git(
        *settings, *FETCH, "--filter=tree:0", f"--depth={depth}", "--stdin", "--", "origin",
        where=history, source=source, send="".join(wanted).encode(), deadline_s=FETCH_S,
    )  # fmt: skip


async def _number_of_branch(history: Path, sha: str) -> int | None:
    """The number of a branch that reaches a commit, or None."""
    said = await run_git(
        "for-each-ref", f"--contains={sha}", "--count=1", "--format=%(refname)", "refs/heads",
        where=history,
    )  # fmt: skip
    number = said.decode().strip().removeprefix(TAKEN)
    return int(number) if number else None


def _is_shallow(repository: Path) -> bool:
    """Whether a repository lacks a part of its history."""
    return has_file(repository / "shallow")


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
