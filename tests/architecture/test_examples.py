"""Every example loads, and its data keeps what its page promises."""

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.user_code import discovery
from schemas.config import EvalConfig, RunConfig
from schemas.toml.overrides import apply_overrides
from schemas.toml.parser import parse_run
from schemas.toml.triggers import parse_triggers
from tests.kit.tomls import run_issues

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"
TOOLS = ROOT / "examples" / "tools"
TRAINING = sorted((ROOT / "examples").glob("*/configs/training/*.toml"))
EVALUATION = sorted((ROOT / "examples").glob("*/configs/eval/*.toml"))


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_every_training_toml_loads(path: Path) -> None:
    config = RunConfig.model_validate_json(json.dumps(tomllib.loads(path.read_text())))
    _entry_point(path, config.experiment.rollout, config.experiment.entrypoint)


@pytest.mark.parametrize("path", EVALUATION, ids=lambda path: path.stem)
def test_every_evaluation_toml_loads(path: Path) -> None:
    config = EvalConfig.model_validate_json(json.dumps(tomllib.loads(path.read_text())))
    _entry_point(path, config.experiment.rollout, config.experiment.entrypoint)


@pytest.mark.parametrize("path", [*TRAINING, *EVALUATION], ids=lambda p: f"{p.parts[-4]}-{p.stem}")
def test_a_toml_names_reward_functions_of_its_rollout(path: Path) -> None:
    config = tomllib.loads(path.read_text())
    names = {reward["name"] for reward in config["advanced"].get("rewards", ())}
    if names:
        rollout, entrypoint = (config["experiment"][key] for key in ("rollout", "entrypoint"))
        tree = discovery.parse(path.parents[2] / "rollouts" / rollout / entrypoint)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        marked = {f.name for f in functions if "reward" in map(ast.unparse, f.decorator_list)}
        assert names <= marked


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/headrace.toml")), ids=lambda path: path.parent.name
)
def test_every_trigger_file_loads_and_names_configs_that_exist(path: Path) -> None:
    triggers = parse_triggers(path.read_bytes())
    assert triggers
    for trigger in triggers:
        config = tomllib.loads((path.parent / trigger.config).read_text())
        parse_run(apply_overrides(config, trigger.set))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/headrace.toml")), ids=lambda path: path.parent.name
)
def test_a_page_makes_its_repository_on_the_branch_of_its_trigger(path: Path) -> None:
    made = re.findall(r"git init\b(?: -b (\w+))?", (path.parent / "README.md").read_text())
    triggers = parse_triggers(path.read_bytes())
    assert set(made) <= {name for trigger in triggers for name in trigger.branches or ()}


def blocks(language: str) -> list[str]:
    """The code blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("text", blocks("toml"), ids=lambda text: text.splitlines()[0])
def test_a_toml_of_the_readme_is_taken_as_it_stands(text: str) -> None:
    data = tomllib.loads(text)
    config = parse_run(data)
    assert not run_issues(data)
    assert config.experiment.model_path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_the_rollout_of_the_readme_has_a_workflow_and_a_grader(tmp_path: Path) -> None:
    (code,) = blocks("python")
    (tmp_path / "main.py").write_text(code)
    module = discovery.load(tmp_path / "main.py")
    assert discovery.workflow_of(module) is not None
    assert discovery.grader_of(module) is not None


def _entry_point(path: Path, rollout: str | None, entrypoint: str | None) -> None:
    if rollout is not None:
        root = path.parents[2]
        assert (root / "rollouts" / rollout / str(entrypoint)).is_file()


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load_maker(EXAMPLE)


def load_maker(example: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_data", example / "data" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(row: dict[str, str]) -> frozenset[int]:
    left, right = row["user_prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
    return frozenset((int(left), int(right)))


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_held_out_questions_share_no_unordered_pair_with_training(
    maker: ModuleType, seed: int
) -> None:
    made = maker.make(seed)
    held_out = {pair(row) for row in made["arithmetic-heldout.jsonl"]}
    assert len(held_out) == maker.NUM_HELD_OUT
    assert not held_out & {pair(row) for row in made["arithmetic-sft.jsonl"]}
    assert not held_out & {pair(row) for row in made["arithmetic-rl.jsonl"]}


def test_data_is_a_function_of_the_seed(maker: ModuleType) -> None:
    assert maker.make(3) == maker.make(3)
    assert maker.make(3) != maker.make(4)


def test_the_demonstrations_are_as_flawed_as_promised(maker: ModuleType) -> None:
    rows = maker.make(0)["arithmetic-sft.jsonl"]
    assert len(rows) == maker.NUM_DEMONSTRATIONS
    right = 0
    for row in rows:
        working, _, answer = row["ground_truth"].partition("=")
        units, tens = map(int, working.split("+"))
        numbers = row["user_prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
        total = sum(map(int, numbers))
        assert units + tens == total
        assert int(answer) in (total, total - 10)
        right += int(answer) == total
    assert right == round(maker.CAREFUL * len(rows))


def test_ground_truths_of_questions_are_sums_that_fit_the_answer_limit(maker: ModuleType) -> None:
    made = maker.make(0)
    limit = tomllib.loads((EXAMPLE / "configs" / "training" / "grpo.toml").read_text())
    for name in ("arithmetic-rl.jsonl", "arithmetic-heldout.jsonl"):
        for row in made[name]:
            numbers = row["user_prompt"].removeprefix("What is ").removesuffix("?").split(" + ")
            left, right = map(int, numbers)
            assert left % 10 + right % 10 >= 10
            assert row["ground_truth"] == str(left + right)
            longest = len(maker.working((left, right), careful=True)) + 1
            assert longest <= limit["training"]["max_response_length"]


@pytest.fixture(scope="module")
def tools_maker() -> ModuleType:
    return load_maker(TOOLS)


def product(text: str) -> tuple[int, int]:
    left, right = text.removesuffix("?").split("*")
    return min(int(left), int(right)), max(int(left), int(right))


def test_the_data_of_the_tools_example_offers_the_tool_of_its_rollout(
    tools_maker: ModuleType,
) -> None:
    made = tools_maker.make(1)
    module = discovery.load(TOOLS / "rollouts" / "tools" / "main.py")
    workflow = discovery.workflow_of(module)
    assert workflow is not None
    [spec] = discovery.tools_of(module, workflow).specs
    function: Any = spec["function"]
    offered = tools_maker.CALC["function"]
    assert (function["name"], [*function["parameters"]["properties"]]) == (
        offered["name"],
        [*offered["parameters"]["properties"]],
    )
    careful = 0
    for row in made["tools-sft.jsonl"]:
        asked, called, _, answer = row["messages"]
        of = json.loads(called["tool_calls"][0]["function"]["arguments"])["of"]
        careful += asked["content"] == f"{of}?"
        assert answer["content"] == str(module.calc(of))
    assert careful == round(tools_maker.CAREFUL * len(made["tools-sft.jsonl"]))


def test_held_out_products_are_not_in_training(tools_maker: ModuleType) -> None:
    made = tools_maker.make(2)
    assert made == tools_maker.make(2)
    held_out = {product(row["user_prompt"]) for row in made["tools-heldout.jsonl"]}
    assert len(held_out) == tools_maker.NUM_HELD_OUT
    assert not held_out & {product(row["user_prompt"]) for row in made["tools-rl.jsonl"]}
    assert not held_out & {
        product(row["messages"][0]["content"]) for row in made["tools-sft.jsonl"]
    }
