"""The door of validation: every check of a TOML is reached through it, and it reports all issues."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from infra.settings.network_policy import NetworkPolicy
from producers.core.models.model_facts import ModelFacts
from producers.core.validation.judge_issues import judge_secrets, judges_of
from producers.core.validation.references import References
from producers.core.validation.rollout_issues import SyncedCommit
from producers.core.validation.validate import require_valid, validate
from producers.core.workspaces import Workspace
from schemas.config import EvalConfig, RunConfig
from schemas.datasets import TRAJECTORY_COLUMNS, DatasetOrigin
from schemas.errors import InvalidConfig, NotFound
from schemas.events import DatasetRegistered
from schemas.ids import WorkspaceId
from schemas.sampling import ModelRef, ProviderRef
from schemas.specs import DatasetRef, DiscoveredRollout, Entrypoint, RubricSpec
from schemas.toml.parser import parse_eval, parse_run
from tests.kit.specs import MODEL, ref

ROOT = Path(__file__).resolve().parents[5]
ROOTS = ("schemas", "trainer", "infra", "consumers", "producers", "headrace")
ROOMS = ("schemas/toml", "producers/core/validation")
"""The folders that hold the checks."""

SHA = "ab" * 20
SECTIONS = {*RunConfig.model_fields, *EvalConfig.model_fields}


def dataset(*columns: str, num_rows: int = 8, name: str = "sums") -> DatasetRegistered:
    return DatasetRegistered(
        dataset=DatasetRef(dataset=name, name=name, content=ref("rows"), num_rows=num_rows),
        columns=columns or ("user_prompt", "ground_truth"),
        file_name="sums.jsonl",
        file_size=1,
        original=ref("rows"),
        characters="",
    )


def trajectories(**origin: Any) -> DatasetRegistered:
    """A dataset of recorded groups."""
    made = DatasetOrigin.model_validate(
        {
            "owner": "r1",
            "name": "first",
            "purpose": "train",
            "kind": "trajectory",
            "first_step": 1,
            "last_step": 2,
            "position": "1-1",
            "model": MODEL,
            "temperature": 1.0,
            "oldest_version": 0,
            "newest_version": 1,
            "num_samples": 8,
            **origin,
        }
    )
    return dataset(*TRAJECTORY_COLUMNS, num_rows=64).model_copy(update={"origin": made})


def toml(**sections: Any) -> dict[str, Any]:
    experiment = {
        "rollout": "say",
        "entrypoint": "main.py",
        "model_path": "scratch:qwen3-tiny",
        "dataset": "sums",
        **sections.pop("experiment", {}),
    }
    return {"experiment": experiment, **sections}


def references(**changes: Any) -> References:
    return References(**{"dataset": dataset(), "model": MODEL, **changes})


SMALL = {"rollout_batch_size": 2}


def test_a_valid_config_has_no_issues() -> None:
    assert validate(parse_run(toml(training=SMALL)), references()) == ()
    assert validate(parse_eval(toml()), references()) == ()


def test_issues_of_text_dataset_model_and_rollout_are_reported_together() -> None:
    config = parse_run(
        toml(
            experiment={"commit_sha": SHA, "rollout": "sya"},
            training={"rollout_batch_size": 9, "max_prompt_length": 4096},
            advanced={"gae_lambda": 0.9, "validation_dataset": "held-out"},
            sampling={"rollout_top_p": 0.5},
            env={"LD_PRELOAD": "x"},
        )
    )
    found = references(
        validation=dataset(num_rows=6000, name="held-out"),
        facts=ModelFacts(context=1024),
        commits=(SyncedCommit(SHA, (), is_whole=True),),
    )
    assert [issue.key for issue in validate(config, found)] == [
        "sampling.rollout_top_p",
        "env.LD_PRELOAD",
        "advanced.gae_lambda",
        "training.rollout_batch_size",
        "advanced.validation_dataset",
        "training.max_prompt_length",
        "experiment.rollout",
    ]


def test_a_workspace_that_does_not_exist_is_said_when_nothing_else_is_wrong() -> None:
    found = references(no_workspace=NotFound("there is no workspace 'w'"))
    with pytest.raises(NotFound):
        require_valid(parse_run(toml(training=SMALL)), found)
    with pytest.raises(InvalidConfig):
        require_valid(parse_run(toml()), found)


SEARCH = Workspace(WorkspaceId("workspace-1"), "search", "/w")


@pytest.mark.parametrize("parse", [parse_run, parse_eval])
def test_addresses_must_be_allowed_by_the_operator(parse: Any) -> None:
    asked = ["API.example.com:443", "10.0.0.7:80", "nowhere", "a:1", "A:1", "169.254.169.254:80"]
    config = parse(toml(advanced={"network": asked}))
    policy = NetworkPolicy.parse("search=api.example.com:443,a:1;*=10.0.0.7:80;else=x.org:1")
    found = references(workspace=SEARCH, network=policy.addresses_of("search"))
    issues = [one for one in validate(config, found) if one.key.startswith("advanced.network")]
    assert [issue.key for issue in issues] == [f"advanced.network[{n}]" for n in (2, 4, 5)]
    assert [issue.message.split(",")[0] for issue in issues] == [
        "must be HOST:PORT with a host name or an IP address",
        "names a:1 twice; keep one",
        "the operator does not allow workspace search to connect to 169.254.169.254:80; ask for "
        "HEADRACE_NETWORK_ALLOW=search=169.254.169.254:80",
    ]


RUBRIC = {"text": "Polite?", "model": "openai/gpt-5-mini"}
LOCAL = {"text": "Polite?", "model": "small", "base_url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize("parse", [parse_run, parse_eval])
@pytest.mark.parametrize(
    ("advanced", "key", "says"),
    [
        ({"rubrics": [{**RUBRIC, "scale": [1, 1]}]}, "rubrics[0].scale", "the lower one first"),
        ({"rubrics": [{**RUBRIC, "model": "nobody/x"}]}, "rubrics[0].model", "no known provider"),
        ({"rubrics": [LOCAL]}, "rubrics[0].base_url", "HEADRACE_NETWORK_ALLOW=search=127.0.0.1:9"),
        (
            {"rubrics": [{**LOCAL, "base_url": "ftp://x"}]},
            "rubrics[0].base_url",
            "not the base URL",
        ),
        (
            {"rubrics": [{**RUBRIC, "name": "a"}, {**RUBRIC, "name": "a"}]},
            "rubrics[1].name",
            "which another reward has",
        ),
        ({"rubrics": [RUBRIC], "judge_max_usd": 1.0}, "rubrics[0].usd_per_million", "is missing"),
        (
            {"rubrics": [{**RUBRIC, "usd_per_million": [-1, 0]}]},
            "rubrics[0].usd_per_million",
            "must be two prices in US dollars of at least 0",
        ),
        ({"judge_max_calls": 5}, "judge_max_calls", "has no meaning without rubrics"),
        ({"rubrics": [{**RUBRIC, "text": "x" * 4000}] * 5}, "rubrics", "use at most 16384 in all"),
    ],
)
def test_rubrics_that_cannot_be_judged_are_refused(
    parse: Any, advanced: dict[str, Any], key: str, says: str
) -> None:
    issues = validate(parse(toml(advanced=advanced)), references(workspace=SEARCH))
    found = {issue.key: issue.message for issue in issues}
    assert says in found[f"advanced.{key}"]


def test_rubrics_that_can_be_judged_have_no_issues() -> None:
    allowed = NetworkPolicy.parse("search=127.0.0.1:9").addresses_of("search")
    priced = {**LOCAL, "name": "own", "usd_per_million": [0, 0]}
    advanced = {"rubrics": [{**RUBRIC, "usd_per_million": [1, 2.5]}, priced], "judge_max_usd": 9.0}
    config = parse_run(toml(training=SMALL, advanced=advanced))
    assert validate(config, references(workspace=SEARCH, network=allowed)) == ()


def test_a_rubric_of_the_entry_point_is_checked_as_far_as_it_is_known() -> None:
    rubric = RubricSpec(name="polite", text="?", model="nobody/x")
    known = DiscoveredRollout(entrypoint=Entrypoint(rollout="say"), rubrics=(rubric,))
    commits = (SyncedCommit(SHA, (known,), is_whole=True),)
    config = parse_run(toml(training=SMALL, advanced={"rewards": [{"name": "polite"}]}))
    [issue] = validate(config, references(workspace=SEARCH, commits=commits))
    assert issue.key == "advanced.rewards[0].model"
    named = judges_of(config, commits)
    assert judge_secrets(named) == {}
    good = rubric.model_copy(update={"model": "xai/grok"})
    assert judge_secrets({"k": good}) == {"k": "XAI_API_KEY"}
    assert judge_secrets({"k": good.model_copy(update={"api_key_secret": "MINE"})}) == {"k": "MINE"}


def sft(**sections: Any) -> dict[str, Any]:
    bare = {"model_path": "m", "dataset": "d"}
    return {
        "experiment": bare,
        **sections,
        "advanced": {"algorithm": "sft", **sections["advanced"]},
    }


PAIRED, BINARY = ("prompt", "chosen", "rejected"), ("prompt", "completion", "label")
LABELLED = ("user_prompt", "ground_truth")


@pytest.mark.parametrize(
    ("algorithm", "columns", "needed"),
    [
        ("dpo", PAIRED, None),
        ("orpo", ("chosen", "rejected"), None),
        ("kto", BINARY, None),
        ("kto", PAIRED, None),
        ("sft", PAIRED, None),
        ("dpo", BINARY, "prompt, chosen and rejected for dpo"),
        ("simpo", LABELLED, "prompt, chosen and rejected for simpo"),
        ("reward_model", (*PAIRED, "margin"), None),
        ("reward_model", BINARY, "prompt, chosen and rejected for reward_model"),
        ("dpo", (*LABELLED, "chosen", "rejected"), "prompt, chosen and rejected for dpo"),
        ("kto", LABELLED, "prompt, completion and label (true or false), or prompt, chosen"),
        (
            "sft",
            BINARY,
            "user_prompt and ground_truth, or messages, or chosen and rejected for sft",
        ),
    ],
)
def test_an_algorithm_needs_the_columns_that_it_learns(
    algorithm: str, columns: tuple[str, ...], needed: str | None
) -> None:
    config = parse_run(sft(advanced={"algorithm": algorithm, "batch_size": 2}))
    issues = validate(config, references(dataset=dataset(*columns)))
    assert [issue.key for issue in issues] == ([] if needed is None else ["experiment.dataset"])
    assert needed is None or f"must have {needed}" in issues[0].message
    held_out = parse_run(
        sft(advanced={"algorithm": algorithm, "batch_size": 2, "validation_dataset": "v"})
    )
    own = {"dpo": PAIRED, "simpo": PAIRED, "orpo": PAIRED, "kto": BINARY, "sft": LABELLED}
    own["reward_model"] = PAIRED
    found = references(dataset=dataset(*own[algorithm]), validation=dataset(*columns))
    keys = [issue.key for issue in validate(held_out, found)]
    assert keys == ([] if needed is None else ["advanced.validation_dataset"])


AWAY = ProviderRef(name="m", model="m", base_url="http://10.0.0.5:8000/v1")

EXAMPLES: tuple[tuple[RunConfig | EvalConfig, References], ...] = (
    (parse_run(toml(advanced={"network": ["a", "a:1"]})), references(workspace=SEARCH)),
    (parse_run(toml(experiment={"branch": "main", "commit_sha": SHA})), references()),
    (parse_run({"experiment": {"model_path": "m", "dataset": "d"}}), references()),
    (parse_run(toml(experiment={"entrypoint": "../main.py"})), references()),
    (parse_run(toml(training={"n_samples_per_prompt": 1000})), references()),
    (
        parse_run(toml(training={"max_prompt_length": 2000})),
        references(facts=ModelFacts(context=9)),
    ),
    (
        parse_run(sft(advanced={"batch_size": 60_000, "execution_mode": "fully_async"})),
        references(),
    ),
    (parse_run(sft(advanced={"validation_dataset": "v"})), references(validation=dataset("text"))),
    (
        parse_run(toml(experiment={"commit_sha": SHA, "rollout": "sya"})),
        references(commits=(SyncedCommit(SHA, (), is_whole=True),)),
    ),
    (
        parse_run(toml(advanced={"rubrics": [{"text": "?", "model": "m", "scale": [1, 0]}]})),
        references(workspace=SEARCH),
    ),
    (
        parse_eval(toml(evaluation={}, experiment={"model_path": "provider:m"})),
        references(workspace=SEARCH, model=ModelRef(kind="provider", name="m", provider=AWAY)),
    ),
    (parse_eval(toml(evaluation={"n": 1000})), references(dataset=dataset(num_rows=99_999))),
    (parse_run(toml(advanced={"algorithm": "gdpo"})), references()),
    (parse_run(toml(advanced={"lora_variant": "dora"})), references(vllm="lora")),
    (parse_run(toml(advanced={"tuning": "full"})), references(vllm="lora")),
    (parse_run(toml(advanced={"algorithm": "distill"})), references()),
    (
        parse_run(
            toml(
                advanced={"execution_mode": "offline", "algorithm": "ppo"},
                sampling={"rollout_top_p": 1.0},
            )
        ),
        references(),
    ),
    (
        parse_run(
            toml(
                advanced={"execution_mode": "offline"},
                sampling={"rollout_temperature": 0.5},
                training={"n_samples_per_prompt": 4},
            )
        ),
        references(dataset=trajectories()),
    ),
    (
        parse_run(toml(advanced={"validation_dataset": "held-out"})),
        references(validation=trajectories()),
    ),
    (parse_run(toml(advanced={"algorithm": "distill", "teacher": "provider:m"})), references()),
)


def makers_of_issues() -> Iterator[tuple[str, str]]:
    """(file, function) for every function in the rooms that builds an Issue."""
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
                    isinstance(inner, ast.Call)
                    and isinstance(inner.func, ast.Name)
                    and inner.func.id == "Issue"
                    for inner in ast.walk(node)
                ):
                    yield str(path.relative_to(ROOT)), node.name


BEFORE_THE_DOOR = {
    "producers/core/validation/given_secrets.py",
    "producers/core/validation/budgets.py",
    "producers/core/validation/fork_issues.py",
    "schemas/toml/parser.py",
    "schemas/toml/violations.py",
    "schemas/toml/finite.py",
    "producers/core/validation/references.py",
    "producers/core/validation/reward_models.py",
    "schemas/toml/triggers.py",
}
"""The files that make the two arguments of `validate`: the parser makes the config, the finder
the objects that it names. Then the parser of another file, `headrace.toml`, and the check of secrets
that are given beside a TOML or to a retry, which has none, that of a budget against the prices of the
installation, and that of a fork against its parent, which only a submit and a fork make."""


def test_every_check_is_reached_through_the_door() -> None:
    reached: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            reached.add((str(path.relative_to(ROOT)), frame.f_code.co_name))

    sys.setprofile(record)
    try:
        refused = [validate(config, found) for config, found in EXAMPLES]
    finally:
        sys.setprofile(None)
    assert all(refused)
    checks = {maker for maker in makers_of_issues() if maker[0] not in BEFORE_THE_DOOR}
    assert len(checks) > 15
    missing = checks - reached
    assert missing == set()


def test_only_the_door_and_its_rooms_know_keys_of_the_toml() -> None:
    """An issue with a `section.key` that is built anywhere else is a check that bypasses the
    door."""
    strays = []
    for root in ROOTS:
        for path in (ROOT / root).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name.startswith(ROOMS) or name.startswith("producers/cli/"):
                continue
            strays += [f"{name}:{line}" for line in toml_issues(path)]
    assert not strays


def toml_issues(path: Path) -> Iterator[int]:
    """The lines where an Issue is built whose key begins with a section of a TOML."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Issue":
            keys = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "key")]
            for constant in (inner for key in keys for inner in ast.walk(key)):
                text = getattr(constant, "value", None)
                if isinstance(text, str) and text.partition(".")[0] in SECTIONS and "." in text:
                    yield node.lineno


def test_submit_has_no_other_way_in() -> None:
    """Runs, dry runs and evaluations are submitted by code that calls the door, once each."""
    tree = ast.parse((ROOT / "producers/core/submit.py").read_text())
    callers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require_valid"
    }
    assert callers == {"resolve_run", "submit_eval"}
