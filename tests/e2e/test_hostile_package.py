"""The user who brings a hostile package reads which one it is, why it is refused and what to do."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.kit.package_index import serve_index
from tests.kit.platform import MAIN, make_workspace, platform, run_config

pytestmark = [pytest.mark.attacks, pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

PYPROJECT = '[project]\nname = "evil"\nversion = "0"\ndependencies = ["good", "evil"]\n'
FILES = {"rollouts/evil/main.py": MAIN, "rollouts/evil/pyproject.toml": PYPROJECT}
ANSWER = (
    "evil==1.0 writes 'pyvenv.cfg', from which the environment's Python starts; leave that package "
    "out, or name a version that does not"
)
WITHIN_S = 120.0


def test_a_commit_with_a_hostile_package_is_answered(tmp_path: Path) -> None:
    source = make_workspace(tmp_path / "source", FILES)
    with serve_index(tmp_path / "index") as index, tempfile.TemporaryDirectory() as shared:
        Path(shared).chmod(0o755)
        index.add_wheel("good", "1.0")
        index.add_wheel("evil", "1.0", files={"evil-1.0.data/data/pyvenv.cfg": "home = env/evil\n"})
        settings = {
            "HEADRACE_PACKAGE_INDEX": index.url,
            "HEADRACE_ENVIRONMENTS": f"{shared}/environments",
        }
        with platform(tmp_path / "home", environment=settings) as started:
            started.upload("numbers")
            added = started.post("/workspaces", {"url": str(source), "name": "w"})
            assert added.status_code == 201, added.text
            run = started.submit(run_config(experiment={"rollout": "evil"}), workspace="w")
            error = started.wait(run, "failed", within_s=WITHIN_S)["run"]["error"]
            said = subprocess.run(
                [sys.executable, "-m", "producers.cli.main", "workspace", "info", "w"],
                env={**started.environment, "COLUMNS": "1000"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            other = started.submit(run_config(advanced={"max_steps": 1}), workspace="w")
            started.wait(other, "finished", within_s=WITHIN_S)
        assert ANSWER in error
        assert ANSWER in " ".join(said.split())
        assert not list(Path(shared).glob("environments/*.partial"))
