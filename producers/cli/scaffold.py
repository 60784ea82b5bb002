"""Making a new workspace: a copy of the example that ships with Headrace, as a git repository with data.

In a wheel the example is inside this package; in a source checkout it is examples/arithmetic.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import producers
from producers.cli.errors import Failure

IDENTITY = ("-c", "user.name=headrace", "-c", "user.email=headrace@localhost")
"""The author of commits when git has no user configured."""


def example_directory() -> Path:
    """The directory of the example. Raises Failure when this installation has none."""
    root = Path(producers.__file__).parent
    for place in (root / "scaffold" / "arithmetic", root.parent / "examples" / "arithmetic"):
        if (place / "rollouts").is_dir():
            return place
    raise Failure(
        "NOT_FOUND", "this installation does not contain the example; install Headrace again"
    )


def scaffold(directory: Path, *, seed: int) -> str:
    """Make a workspace in `directory` and return its first commit. Raises Failure when the directory is
    not empty."""
    if directory.exists() and any(directory.iterdir()):
        raise Failure("CONFLICT", f"{directory} is not empty; name a new or empty directory")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.jsonl", ".venv")
    shutil.copytree(example_directory(), directory, ignore=ignored, dirs_exist_ok=True)
    make_data(directory, seed=seed)
    _git(directory, "init", "--quiet", "--initial-branch=main")
    return commit(directory, "A workspace from the arithmetic example")


def make_data(directory: Path, *, seed: int) -> None:
    """Run the script of the example that generates its data. Raises Failure when it fails."""
    maker = directory / "data" / "make.py"
    completed = subprocess.run(
        [sys.executable, "-I", str(maker), "--seed", str(seed), "--out", str(maker.parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise Failure("FAILED", f"{maker} failed: {completed.stderr.strip()[-500:]}")


def commit(directory: Path, message: str) -> str:
    """Commit everything and return the full hash."""
    email = _git(directory, "config", "user.email", quiet=True)
    _git(directory, "add", "--all")
    identity = () if email else IDENTITY
    _git(directory, *identity, "commit", "--quiet", "--no-gpg-sign", "-m", message)
    return _git(directory, "rev-parse", "HEAD")


def _git(directory: Path, *arguments: str, quiet: bool = False) -> str:
    try:
        completed = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise Failure("NO_GIT", "git is not installed; install it and try again") from error
    if completed.returncode and not quiet:
        raise Failure("FAILED", f"git {arguments[0]} failed: {completed.stderr.strip()[-300:]}")
    return completed.stdout.strip()
