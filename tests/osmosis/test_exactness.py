"""A run that the unmodified client submits has the bits of the same TOML, submitted by `headrace`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.platform import MAIN, git, make_workspace, platform
from tests.kit.pushed_workspace import toml_of
from tests.osmosis.client import Osmosis

pytestmark = [pytest.mark.osmosis, pytest.mark.processes, pytest.mark.torch, pytest.mark.slow]

REPOSITORY = "acme/sums"
CONFIG = "configs/training/say.toml"


@pytest.fixture
def worktree(tmp_path: Path) -> Path:
    """A workspace in the layout that the client wants, whose origin looks like GitHub."""
    files = {
        "rollouts/say/main.py": MAIN,
        CONFIG: toml_of(env={"LOG_LEVEL": "INFO"}),
        CONFIG.replace("say", "other"): toml_of(advanced={"seed": 8}),
        "configs/eval/.gitkeep": "",
        "data/.gitkeep": "",
    }
    found = make_workspace(tmp_path / "sums", files)
    git(found, "remote", "add", "origin", f"https://github.com/{REPOSITORY}.git")
    return found


def test_the_client_and_the_toml_make_identical_checkpoints(
    program: Path, worktree: Path, tmp_path: Path
) -> None:
    with platform(tmp_path / "home") as started:
        made = started.post(
            "/workspaces", {"url": str(worktree), "name": "sums", "repository": REPOSITORY}
        )
        assert made.status_code == 201, made.text
        started.upload("numbers")
        api_key = (started.home / "token").read_text().strip()
        (tmp_path / "person").mkdir()
        osmosis = Osmosis(program, started.url, tmp_path / "person", worktree, api_key)
        theirs = [
            osmosis.run("train", "submit", path, "--yes")["resource"]["name"]
            for path in (CONFIG, CONFIG.replace("say", "other"))
        ]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "producers.cli.main", "train", "submit", CONFIG),
                *("--workspace", "sums", "--json"),
            ],
            cwd=worktree,
            env=started.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        own = json.loads(done.stdout)["run"]["name"]
        versions = {}
        for name in (*theirs, own):
            saved = started.wait(name, "finished", within_s=240)["checkpoints"]
            versions[name] = [(one["step"], one["adapter_sha256"]) for one in saved]
        info = osmosis.run("train", "info", theirs[0])["data"]
    assert versions[theirs[0]] == versions[own]
    assert len(versions[own]) > 1
    assert versions[theirs[1]] != versions[own], "another seed makes other weights"
    assert [one["checkpoint_step"] for one in info["checkpoints"]] == [
        step for step, _ in versions[own]
    ]
