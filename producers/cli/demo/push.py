"""The part of the demo in which a `git push` starts the training.

A bare repository stands for a git server. Its post-receive hook posts a signed webhook to Headrace, as a
forge does.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from producers.cli.client import Client, path_segment
from producers.cli.demo import post_receive
from producers.cli.display.output import Document
from producers.cli.errors import Failure
from producers.cli.scaffold import commit

PATIENCE_S = 60.0
LOOK_EVERY_S = 0.1


class GitServer:
    """A bare repository with a hook, connected to a workspace."""

    def __init__(self, client: Client, tree: Path, *, name: str) -> None:
        """`tree` is the working tree whose `origin` it becomes."""
        self._client = client
        self._tree = tree
        self._bare = tree.parent / f"{tree.name}.git"
        self._name = name
        self.workspace = ""

    def connect(self) -> None:
        """Make the repository with the branches of the tree, and connect it. Raises Failure."""
        _git(self._tree, "init", "--quiet", "--bare", "--initial-branch=main", str(self._bare))
        _git(self._tree, "remote", "add", "origin", str(self._bare))
        _git(self._tree, "push", "--quiet", "--all", "origin")
        body = {"url": str(self._bare), "name": self._name, "forge": "none"}
        answer: Document = self._client.post("/workspaces/connect", body)
        self.workspace = str(answer["workspace"]["id"])
        self._install_hook(str(answer["hook"]["url"]), str(answer["hook"]["secret"]))

    def push(self, message: str) -> str:
        """Commit everything in the tree and push it. Returns what the server's hook said."""
        commit(self._tree, message)
        return self._push()

    def _push(self) -> str:
        said = _git(self._tree, "push", "--quiet", "origin", "main")
        lines = [line.removeprefix("remote:").strip() for line in said.splitlines()]
        return next((line for line in lines if line.startswith("webhook:")), "")

    def wait_for_run(self) -> Document:
        """Wait until the newest push has led to a run. Returns its delivery. Raises Failure when it led
        to none."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            newest = self.newest_delivery()
            if newest is None:  # the webhook was accepted, and its row comes a moment later
                time.sleep(LOOK_EVERY_S)
                continue
            outcomes = {run["outcome"] for run in newest["runs"]}
            if "submitted" in outcomes:
                return newest
            if "refused" in outcomes or newest["result"].startswith("no run"):
                raise Failure("NO_RUN", f"the push started no run: {newest['result']}")
            time.sleep(LOOK_EVERY_S)
        raise Failure(
            "NO_RUN", f"the push started no run within {PATIENCE_S:g} s; see the server's log"
        )

    def newest_delivery(self) -> Document | None:
        """The newest delivery of the workspace, if there is one."""
        path = f"/workspaces/{path_segment(self.workspace)}/deliveries"
        found: list[Document] = self._client.get(path, {"limit": 1})["deliveries"]
        return found[0] if found else None

    def wait_for_status(self, say: Callable[[str], None]) -> Document:
        """Wait until the commit shows that its run has ended. Returns the run of the delivery."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            newest = self.newest_delivery()
            run: Document = newest["runs"][0] if newest else {}
            if run.get("commit_state") not in (None, "pending"):
                say(f"Status on the commit: {run['commit_state']}: {run['commit_text']}")
                return run
            time.sleep(LOOK_EVERY_S)
        raise Failure("NO_STATUS", "the commit shows no final status; see the server's log")

    def _install_hook(self, url: str, secret: str) -> None:
        settings = self._bare / "headrace-hook"
        settings.touch(mode=0o600)
        settings.write_text(f"{url}\n{secret}\n")
        hook = self._bare / "hooks" / "post-receive"
        hook.parent.mkdir(exist_ok=True)
        _, _, program = Path(post_receive.__file__).read_text().partition("\n")
        hook.write_text(f"#!{sys.executable}\n{program}")
        hook.chmod(0o755)


def commit_on_branch(tree: Path, branch: str, path: str, content: str, message: str) -> None:
    """Commit a file of other content on a new branch of the tree, which stays on its own branch. Raises
    Failure."""
    _git(tree, "checkout", "--quiet", "-b", branch)
    (tree / path).write_text(content)
    commit(tree, message)
    _git(tree, "checkout", "--quiet", "-")


def trigger_table(*, config: str, name: str, overrides: Document) -> str:
    """The `headrace.toml` that starts the demo's run: one trigger, with these overrides."""
    inner = ", ".join(f'"{key}" = {json.dumps(value)}' for key, value in overrides.items())
    return f"""# A push to main starts the run of configs/training/grpo.toml.
[[trigger]]
branches = ["main"]
config = {json.dumps(config)}
name = {json.dumps(name)}
set = {{ {inner} }}
"""


def _git(tree: Path, *arguments: str) -> str:
    """The output and messages of git. Raises Failure when it fails."""
    done = subprocess.run(
        ["git", *arguments],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Failure("FAILED", f"git {arguments[0]} failed: {done.stdout.strip()[-300:]}")
    return done.stdout
