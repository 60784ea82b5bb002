"""Tasks of the real package reasoning-gym, from the name in a TOML to a step of training. They are
generated in the sandbox, and scored by the package's own scorer in the rollout's environment.

The rollout is the one of examples/smollm, with the smallest model.
"""

import json
import shutil
from pathlib import Path

import pytest

from infra.sandbox.environments.local import load_settings, open_environments
from infra.sandbox.generated_rows import generate_rows
from producers.cli.config_files import read_config
from schemas.errors import Refused
from schemas.events import GroupGraded
from schemas.toml.config_issues import config_issues
from schemas.toml.generated_tasks import (
    OVERRIDES,
    REQUIREMENTS,
    dataset_name,
    is_generated,
    parse_generated,
)
from schemas.toml.parser import parse_eval, parse_run
from tests.kit.in_memory import in_memory
from tests.kit.platform import ROOT, TINY, git

pytestmark = [pytest.mark.agents, pytest.mark.processes]

EXAMPLE = ROOT / "examples" / "smollm"
TRAINED, HELD_OUT = (
    f"reasoning-gym:chain_sum?max_terms=2&max_digits=1&size=8&split={split}"
    for split in ("train", "held_out")
)


async def generate(ref: str) -> bytes:
    async with open_environments(load_settings()) as environments:
        return await generate_rows(parse_generated(ref), environments)


async def test_the_same_name_gives_the_same_rows_and_the_splits_share_none() -> None:
    trained, again, held_out = [await generate(ref) for ref in (TRAINED, TRAINED, HELD_OUT)]
    assert trained == again
    questions = [
        {json.loads(line)["user_prompt"] for line in rows.splitlines()}
        for rows in (trained, held_out)
    ]
    assert len(questions[0]) == len(questions[1]) == 8
    assert questions[0] & questions[1] == set()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("chain_sm", "did you mean chain_sum"),
        ("chain_sum?max_term=3", "no parameter 'max_term'; did you mean max_terms"),
        ("chain_sum?max_terms=three", 'max_terms must be a whole number, got "three"'),
        ("chain_sum?max_terms=1", "refuses its parameters: max_terms must be >= min_terms"),
        ("products?max_digits=1&split=held_out", "products has 24 different questions"),
        ("game_of_life?size=4", "needs the package cellpylib, which has no wheel"),
        ("arc_agi?size=4", "gives another score when an entry was stored as JSON"),
    ],
)
async def test_a_name_that_cannot_be_generated_is_refused_with_the_reason(
    query: str, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        await generate(f"reasoning-gym:{query}")


async def test_a_run_is_scored_by_the_packages_own_scorer(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    shutil.copytree(EXAMPLE, workspace, ignore=shutil.ignore_patterns("__pycache__"))
    git(workspace, "init", "-q", "-b", "main")
    git(workspace, "add", "-A")
    git(workspace, "commit", "-q", "-m", "The example")
    config = read_config(EXAMPLE / "configs" / "training" / "grpo.toml")
    assert is_generated(config["experiment"]["dataset"])
    config["experiment"] |= {"model_path": TINY, "dataset": TRAINED}
    config["training"] |= {"n_samples_per_prompt": 16, "rollout_batch_size": 4}
    config["advanced"] |= {"max_steps": 1, "validation_dataset": HELD_OUT, "seed": 3}
    config["advanced"]["deterministic"] = True
    config["checkpoints"] = {"eval_interval": 1, "checkpoint_save_freq": 1}
    async with in_memory(tmp_path / "home") as platform:
        for ref in (TRAINED, HELD_OUT):
            (file := tmp_path / "rows.jsonl").write_bytes(await generate(ref))
            await platform.upload(dataset_name(ref), file)
        await platform.workspaces.add(str(workspace), name="w")
        await platform.run_to_end(config, workspace="w")
        rewards = [
            grade.reward for event in platform.events_of(GroupGraded) for grade in event.grades
        ]
    assert len(rewards) >= 4 * 16
    assert None not in rewards, "every answer is scored"
    assert any(rewards), "a random model says a right number now and then"


def test_the_configs_of_the_example_use_the_same_held_out_rows() -> None:
    run = parse_run(read_config(EXAMPLE / "configs" / "training" / "grpo.toml"))
    measured = parse_eval(read_config(EXAMPLE / "configs" / "eval" / "sampled.toml"))
    assert [*config_issues(run), *config_issues(measured)] == []
    assert run.advanced.validation_dataset == measured.experiment.dataset


def test_the_example_and_the_page_name_the_packages_that_the_rows_need() -> None:
    project = (EXAMPLE / "rollouts" / "smollm" / "pyproject.toml").read_text()
    page = (ROOT / "docs" / "datasets.md").read_text()
    for text in (project, page):
        assert all(f'"{name}"' in text for name in (*REQUIREMENTS, *OVERRIDES))
