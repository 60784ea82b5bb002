"""The refs that a repository lists: its branches, its tags, and its default branch.

A listing is written by the other side, so a name is taken only if it is safe and readable. Other names
are left out, as if the ref were not there.
"""

import asyncio
import hashlib
import re
from collections.abc import Mapping

from infra.ports.services import RefList
from infra.repositories.git.process import GitFailed, GitSource, run_git
from schemas.errors import InvalidConfig, Refused

ASK_S = 120.0
"""How many seconds a listing may take."""

MOST_REFS = 10_000
SHOWN_BRANCHES = 5
LONGEST_REF = 255

REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
HEX = re.compile(r"[0-9a-f]{7,40}")
ID = re.compile(r"[0-9a-f]{40}")
BRANCH, TAG = "refs/heads/", "refs/tags/"
PEELED = "^{}"


async def list_refs(source: GitSource) -> RefList:
    """Return the branches and tags. Raises GitFailed, and Refused when there are too many."""
    said = await run_git(
        "ls-remote", "--symref", "--", source.url, "HEAD", f"{BRANCH}*", f"{TAG}*",
        source=source, deadline_s=ASK_S,
    )  # fmt: skip
    return await asyncio.to_thread(read_listing, said, url=source.url)


def read_listing(said: bytes, *, url: str) -> RefList:
    """Parse the output of `ls-remote --symref`. Raises Refused for more than MOST_REFS refs."""
    refs: dict[str, str] = {}
    peeled: dict[str, str] = {}
    head = None
    for line in said.split(b"\n"):
        value, _, raw = line.partition(b"\t")
        name = raw.decode(errors="replace")
        if value.startswith(b"ref: ") and name == "HEAD":
            head = value.removeprefix(b"ref: ").decode(errors="replace")
        elif ID.fullmatch(value.decode(errors="replace")) and is_safe_ref(
            name.removesuffix(PEELED)
        ):
            (peeled if name.endswith(PEELED) else refs)[name.removesuffix(PEELED)] = value.decode()
    refs |= {name: sha for name, sha in peeled.items() if name in refs}
    return make_listing(refs, head, url=url)


def make_listing(listed: Mapping[str, str], head: str | None, *, url: str) -> RefList:
    """Return a listing of the refs that are safe, as full ref name -> commit. `head` is the full name of
    the default branch, or None. Raises Refused for more than MOST_REFS refs."""
    refs = {name: sha for name, sha in listed.items() if is_safe_ref(name) and ID.fullmatch(sha)}
    if len(refs) > MOST_REFS:
        raise Refused(
            f"{url} has {len(refs)} branches and tags, and at most {MOST_REFS} are followed: delete "
            "old ones there"
        )
    default = head.removeprefix(BRANCH) if head in refs and head.startswith(BRANCH) else None
    return RefList(refs=refs, digest=_digest(refs, default), default_branch=default)


def is_safe_ref(name: str) -> bool:
    """Whether a name is that of a branch or a tag, and can be shown and given to git. No part of it
    begins with a dash."""
    short = name.removeprefix(BRANCH) if name.startswith(BRANCH) else name.removeprefix(TAG)
    return (
        short not in ("", name)
        and len(name.encode(errors="replace")) <= LONGEST_REF
        and name.isprintable()
        and "\N{REPLACEMENT CHARACTER}" not in name
        and not re.search(r'[\s~^:?*\[\\"\']|\.\.|@\{', name)
        and all(part and part[0] not in "-." for part in short.split("/"))
        and not name.endswith((".lock", "."))
    )


def _digest(refs: Mapping[str, str], default: str | None) -> str:
    lines = [f"{sha} {name}\n" for name, sha in sorted(refs.items())]
    return hashlib.sha256("".join([*lines, f"{default or ''}\n"]).encode()).hexdigest()


async def newest_of(source: GitSource, branch: str) -> str | None:
    """Return the newest commit of a branch, or None when there is no such branch. Raises InvalidConfig
    when this is not the name of a branch."""
    ref = f"{BRANCH}{checked_branch(branch)}"
    said = await run_git("ls-remote", "--", source.url, ref, source=source, deadline_s=ASK_S)
    return ids_by_ref(said).get(ref)


async def default_branch(source: GitSource) -> tuple[str, str]:
    """Return the default branch and its newest commit. Raises InvalidConfig when there is none."""
    said = await run_git(
        "ls-remote", "--symref", "--", source.url, "HEAD", source=source, deadline_s=ASK_S
    )
    sha = ids_by_ref(said).get("HEAD")
    heads = (line.partition("\t") for line in _lines(said) if line.startswith(f"ref: {BRANCH}"))
    head = next((value.removeprefix("ref: ") for value, _, name in heads if name == "HEAD"), None)
    if head is None or sha is None:
        raise InvalidConfig(await _why_no_head(source))
    return checked_branch(head.removeprefix(BRANCH)), sha


async def _why_no_head(source: GitSource) -> str:
    """Why a repository has no commit that its HEAD names, and what to do."""
    found = sorted(name.removeprefix(BRANCH) for name in await branches(source))
    if not found:
        return f"{source.url} has no commits; push a commit first"
    return (
        f"{source.url} has no commit on its default branch, but on {', '.join(found[:SHOWN_BRANCHES])}; "
        f"choose the default branch, in a bare repository with `git symbolic-ref HEAD "
        f"{BRANCH}{found[0]}`, or push a commit to it"
    )


async def branches(source: GitSource) -> dict[str, str]:
    """Return the branches whose names are safe, by full ref name. Raises Refused when there are too
    many."""
    said = await run_git("ls-remote", "--heads", "--", source.url, source=source, deadline_s=ASK_S)
    found = (await asyncio.to_thread(read_listing, said, url=source.url)).refs
    return {ref: sha for ref, sha in found.items() if ref.startswith(BRANCH)}


def checked_branch(name: str) -> str:
    """Return the name. Raises InvalidConfig when it is not safe as the name of a branch."""
    if not REF.fullmatch(name) or ".." in name:
        raise InvalidConfig(f"branch {name!r} is not a branch name")
    return name


def ids_by_ref(said: bytes) -> dict[str, str]:
    """Parse the output of `ls-remote`. Returns ref -> commit."""
    lines = (line.split("\t") for line in _lines(said))
    return {line[1]: line[0] for line in lines if len(line) == 2 and HEX.fullmatch(line[0])}


def _lines(said: bytes) -> list[str]:
    """Only a line feed ends a line. A name may hold characters that Unicode takes for line ends."""
    return said.decode(errors="replace").split("\n")


def is_not_given_out(failed: GitFailed) -> bool:
    """Whether the repository does not give out, or does not have, the commit that was asked for."""
    return bool(re.search(r"not our ref|unadvertised object|couldn't find remote", failed.stderr))
