"""Every template of `rollout init` makes files that Headrace takes."""

import json
import tomllib
from pathlib import Path

import pytest

from headrace.user_code import discovery
from producers.cli.errors import Failure
from producers.cli.rollouts.templates import TEMPLATES, make_rollout
from producers.tryout.plan import check_rows, read_dataset
from tests.kit.tomls import run_issues

WITHOUT_PACKAGES = [name for name, template in TEMPLATES.items() if not template.packages]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_rollout_with_a_config_and_a_dataset(tmp_path: Path, template: str) -> None:
    made = make_rollout(tmp_path, "mine", template)
    assert all(path.is_file() for path in made)
    config = tomllib.loads((tmp_path / "configs/training/mine.toml").read_text())
    assert run_issues(config) == ()
    assert config["experiment"]["rollout"] == config["experiment"]["dataset"] == "mine"
    file = read_dataset(tmp_path / "data/mine.jsonl")
    check_rows(file)
    assert len(file.rows) == 64
    project = tomllib.loads((tmp_path / "rollouts/mine/pyproject.toml").read_text())
    assert tuple(project["project"]["dependencies"]) == TEMPLATES[template].packages
    compile((tmp_path / "rollouts/mine/main.py").read_text(), "main.py", "exec")


@pytest.mark.parametrize("template", WITHOUT_PACKAGES)
def test_a_template_without_packages_loads(tmp_path: Path, template: str) -> None:
    make_rollout(tmp_path, "mine", template)
    module = discovery.load(tmp_path / "rollouts/mine/main.py")
    assert discovery.workflow_of(module) is not None
    assert discovery.grader_of(module) is not None


def test_a_row_of_an_environment_holds_its_task(tmp_path: Path) -> None:
    make_rollout(tmp_path, "mine", "verifiers")
    row = read_dataset(tmp_path / "data/mine.jsonl").rows[5]
    assert json.loads(str(row.metadata["task"])) == {"prompt": "2 * 7?", "answer": 14}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_rollout(tmp_path, "mine", "single-turn")
    (tmp_path / "rollouts/mine/main.py").write_text("changed")
    with pytest.raises(Failure, match=r"rollouts/mine/main\.py.*exists already"):
        make_rollout(tmp_path, "mine", "tools")
    assert (tmp_path / "rollouts/mine/main.py").read_text() == "changed"


@pytest.mark.parametrize("name", ["", "../up", "Upper", "a/b", "x" * 64, "-a"])
def test_a_name_that_no_rollout_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Failure, match="cannot name a rollout"):
        make_rollout(tmp_path, name, "single")
    assert not list(tmp_path.iterdir())
