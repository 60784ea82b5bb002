"""The git repository that contains a config file, and its workspace on the server.

`train submit` and `eval submit` need no workspace argument. They look up the repository that contains
the TOML among the server's workspaces, by its path or its origin, and register it when it is new. The
code that runs is that of a *commit*: uncommitted changes are not part of it, and the user is warned
about them.
"""

import difflib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from producers.cli.client import Client
from producers.cli.display.output import Document, say
from producers.cli.errors import Failure
from schemas.errors import Issue

WORKING_TREE = "refs/headrace/working-tree"
"""The ref of the last commit that was made of a working tree, so that git keeps it."""

MOST_NAMES = 20
"""How many names of rollouts or files an error message lists."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A working tree: its root, the URL of its origin, and the paths with uncommitted changes."""

    root: Path
    origin: str | None
    changed: tuple[str, ...]


def address_of(path_or_url: str) -> str:
    """Return a URL as it is, and the absolute path of a directory that exists here."""
    local = Path(os.path.expanduser(path_or_url))  # noqa: PTH111 - a user without a home is not an error
    return str(local.resolve()) if local.exists() else path_or_url


def repository_around(path: Path) -> Repository:
    """The repository that contains `path`. Raises Failure when there is none, or when it has no
    commit."""
    folder = path.resolve().parent
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        raise Failure(
            "NOT_A_REPOSITORY",
            f"{folder} is not in a git repository, and rollouts run from a commit; make one with "
            "`git init`, or create a workspace with `headrace workspace init DIR`",
        )
    root = Path(top)
    if _git(root, "rev-parse", "--verify", "HEAD") is None:
        raise Failure("NO_COMMIT", f"the repository {root} has no commit; commit the rollout first")
    changed = (_git(root, "status", "--porcelain", "--", "rollouts") or "").splitlines()
    origin = _git(root, "remote", "get-url", "origin")
    return Repository(root, origin, tuple(line[3:] for line in changed))


def check_rollout(repository: Repository, config: Document) -> None:
    """Check that the commit that will run contains the rollout of the config. Raises Failure when the
    repository has the commit but the commit lacks the rollout."""
    experiment: Document = config.get("experiment") or {}
    name, path = experiment.get("rollout"), experiment.get("entrypoint") or "main.py"
    commit = experiment.get("commit_sha") or experiment.get("branch") or "HEAD"
    root = repository.root
    if not isinstance(name, str) or _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return
    place = f"rollouts/{name}/{path}"
    if _git(root, "cat-file", "-e", f"{commit}:{place}") is not None:
        return
    key, given, what = "experiment.rollout", name, "its rollouts"
    known = _names(root, f"{commit}:rollouts", "-d")
    folder, is_committed = root / "rollouts" / name, name in known
    is_new = not is_committed and Path(name).name == name and folder.is_dir()
    if is_committed or (is_new and not (root / place).is_file()):
        known = _names(root, f"{commit}:rollouts/{name}", "-r") if is_committed else _files(folder)
        key, given, what = "experiment.entrypoint", path, f"the files of {name}"
    if (root / place).is_file():
        message = f"names {place}, which is not committed; commit it first"
    elif is_new:
        names = ", ".join(known[:MOST_NAMES]) or "none"
        message = (
            f"names {place}, which does not exist; {what}, which are not committed yet: {names}"
        )
    else:
        names = ", ".join(known[:MOST_NAMES]) or "none"
        message = f"names {place}, which is not in commit {commit}; {what}: {names}"
    close = difflib.get_close_matches(given, [one for one in known if one != given], n=1)
    issue = Issue(key, message, close[0] if close else None)
    raise Failure("VALIDATION", f"{key} {message}", issues=(issue,))


def _names(root: Path, tree: str, kind: str) -> list[str]:
    """The folders (-d) or all files (-r) of a tree."""
    return (_git(root, "ls-tree", "--name-only", kind, tree) or "").splitlines()


def _files(folder: Path) -> list[str]:
    """The files of a folder by their paths in it."""
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*.py") if one.is_file())


def is_local_server(client: Client) -> bool:
    """Whether the server is on this machine, so that it can read a repository by its path."""
    return urlsplit(client.address.url).hostname in ("127.0.0.1", "localhost", "::1")


def workspace_of(
    client: Client, repository: Repository, config: Document, *, quiet: bool = False
) -> str:
    """The id of the workspace whose code a config runs. Raises Failure when the code is not in the
    commit, if that can be seen from here. Unless `quiet`, it says when the commit that is checked out
    is not the one that runs."""
    if is_local_server(client):
        check_rollout(repository, config)
    found, url = ensure_workspace(client, repository)
    if not quiet and url != str(repository.root):
        experiment: Document = config.get("experiment") or {}
        root, commit = repository.root, experiment.get("commit_sha") or "HEAD"
        is_pushed = _git(root, "branch", "--remotes", "--contains", commit)
        if not is_pushed and not experiment.get("branch"):
            checked_out = _git(root, "rev-parse", "--short", commit) or commit
            say(f"note: commit {checked_out} is not pushed; the run takes a commit that {url} has")
    return found


def ensure_workspace(client: Client, repository: Repository) -> tuple[str, str]:
    """The id and the address of the server's workspace for this repository, which is registered when
    it is new. One that has the path comes before one that has the origin.

    A server on this machine reads the repository by its path. Any other server can only reach its
    origin. Raises Failure when the repository has no origin then.
    """
    known: dict[object, str] = {}
    for workspace in client.pages("/workspaces", "workspaces"):
        known.setdefault(workspace.get("url"), str(workspace["id"]))
    for address in (str(repository.root), repository.origin):
        if address is not None and address in known:
            return known[address], address
    url = str(repository.root) if is_local_server(client) else repository.origin
    if url is None:
        raise Failure(
            "NO_ORIGIN",
            f"the server at {client.address.url} cannot read {repository.root}, which has no remote "
            "`origin`; push it and set `origin`, or name a workspace with --workspace",
        )
    try:
        created: Document = client.post("/workspaces", {"url": url})["workspace"]
    except Failure as error:
        if error.code != "FORBIDDEN":
            raise
        message = (
            f"no workspace that this API key may see is of {url}, and it may not add one; name a "
            "workspace with --workspace, or let an administrator add this repository"
        )
        raise Failure(error.code, message) from error
    return str(created["id"]), url


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git, or None when the command fails."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise Failure("NO_GIT", "git is not installed; install it and try again") from error
    return completed.stdout.rstrip("\n") if completed.returncode == 0 else None


def commit_working_tree(repository: Repository) -> str:
    """The id of a commit with the files of a working tree as they are, without those that git ignores.
    It is HEAD if nothing is changed. Neither a branch nor the index is touched: the commit is made with
    an index of its own, and only the ref `refs/headrace/working-tree` names it. Raises Failure."""
    root = repository.root
    with tempfile.TemporaryDirectory() as directory:
        index = {"GIT_INDEX_FILE": str(Path(directory) / "index")}
        _run_git(root, "read-tree", "HEAD", environment=index)
        _run_git(root, "add", "--all", environment=index)
        tree = _run_git(root, "write-tree", environment=index)
    if tree == _run_git(root, "rev-parse", "HEAD^{tree}"):
        return _give_to_origin(repository, _run_git(root, "rev-parse", "HEAD"))
    fixed = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (
            ("NAME", "headrace"),
            ("EMAIL", "headrace@localhost"),
            ("DATE", "2000-01-01T00:00:00Z"),
        )
    }
    commit = _run_git(
        root, "commit-tree", tree, "-p", "HEAD", "-m", "A working tree", environment=fixed
    )
    _run_git(root, "update-ref", WORKING_TREE, commit)
    return _give_to_origin(repository, commit)


def _give_to_origin(repository: Repository, commit: str) -> str:
    """Give a commit to an origin that is a directory of this machine, in case the server reads that one.
    It gets the same ref, and no branch. Other origins get nothing: what is not committed stays here.
    Returns the commit."""
    origin = repository.origin
    if origin is not None and Path(origin.removeprefix("file://")).is_dir():
        to = f"+{commit}:{WORKING_TREE}"
        _run_git(repository.root, "push", "--quiet", "--no-verify", "origin", to)
    return commit


def _run_git(root: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """The output of git. Raises Failure with its message when it fails."""
    completed = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if completed.returncode:
        raise Failure("GIT_FAILED", f"git {arguments[0]} failed: {completed.stderr.strip()}")
    return completed.stdout.strip()
