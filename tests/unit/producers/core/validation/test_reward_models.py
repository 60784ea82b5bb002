"""Which checkpoints a run may name as reward models, and what it pins of them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from producers.core.lookup import Checkpoint
from producers.core.validation.reward_models import find_reward_models
from producers.core.workspaces import Workspace
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Issue, NotFound
from schemas.events import CheckpointSaved, RunRequested
from schemas.events.artifact_refs import collectable, references
from schemas.sampling import ModelRef
from schemas.specs import CheckpointSpec, DatasetRef, StateRef
from schemas.toml.parser import parse_eval, parse_run
from tests.kit.tomls import run_issues

WEIGHTS = ArtifactRef(uri="row:weights", sha256="a" * 64, size=3)
EXPERIMENT = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}


def workspace(identity: str = "w1") -> Any:
    class Own:
        id, name = identity, f"name-of-{identity}"

    return Own()


def checkpoint(
    algorithm: str = "reward_model", base: ModelRef | None = None, owner: str | None = None
) -> Checkpoint:
    experiment = {"model_path": "m", "dataset": "d"}
    if algorithm != "reward_model":
        experiment = EXPERIMENT
    model = base or ModelRef(kind="hub", name="org/base")
    run = RunRequested(
        run="r1",
        run_name="judge",
        config=parse_run(
            {"experiment": experiment, "advanced": {"algorithm": algorithm, "lora_alpha": 8.0}}
        ),
        model=model,
        dataset=DatasetRef(dataset="d", name="d", content=WEIGHTS, num_rows=1),
        workspace=owner,
        date="2026-11-28",
    )
    state = StateRef(step=5, weights_sha256="a" * 64, state_sha256="b" * 64, weights=WEIGHTS)
    spec = CheckpointSpec(
        run="r1",
        step=5,
        model=model,
        tuning="lora",
        state=state,
        batch=None,
        plan=(),
        versions={},
        seed=0,
        parent=None,
    )
    saved = CheckpointSaved(spec=spec, manifest=WEIGHTS, reward=None)
    return Checkpoint(run, saved, datetime.now(UTC))


class Known:
    """A lookup that knows one checkpoint."""

    def __init__(self, found: Checkpoint | None) -> None:
        self._found = found

    async def checkpoint(self, ref: str) -> Checkpoint:
        if self._found is None:
            raise NotFound(f"there is no run {ref}")
        return self._found


def paid(*models: dict[str, Any], **advanced: Any) -> dict[str, Any]:
    return {"experiment": EXPERIMENT, "advanced": {"reward_models": list(models), **advanced}}


async def find(
    found: Checkpoint | None, own: Workspace | None = None
) -> tuple[tuple[Any, ...], list[Issue]]:
    issues: list[Issue] = []
    lookup: Any = Known(found)
    config = parse_run(paid({"model": "judge@last", "weight": 2.0}))
    return await find_reward_models(config, lookup, own or workspace(), issues), issues


async def test_a_run_pins_base_weights_and_date_of_a_checkpoint() -> None:
    (spec,), issues = await find(checkpoint())
    assert not issues
    assert (spec.name, spec.weight, spec.checkpoint) == ("reward_model_1", 2.0, "r1@5")
    assert (spec.base.name, spec.weights, spec.lora_alpha) == ("org/base", WEIGHTS, 8.0)
    assert spec.date == "2026-11-28"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "there is no run judge@last"),
        (checkpoint("grpo"), "is not a reward model but a policy of grpo"),
        (checkpoint(owner="w2"), "belongs to another workspace"),
        (
            checkpoint(base=ModelRef(kind="directory", name="/nowhere/model")),
            "there is no /nowhere/model on the server",
        ),
    ],
    ids=["missing", "a policy", "of another workspace", "without its base"],
)
async def test_a_checkpoint_that_cannot_score_is_an_issue_of_its_key(
    found: Checkpoint | None, says: str
) -> None:
    specs, (issue,) = await find(found)
    assert specs == ()
    assert issue.key == "advanced.reward_models[0].model"
    assert says in issue.message


async def test_a_base_directory_that_exists_and_an_own_workspace_are_fine(tmp_path: Path) -> None:
    base = ModelRef(kind="directory", name=str(tmp_path))
    specs, issues = await find(checkpoint(base=base, owner="w1"))
    assert len(specs) == 1
    assert not issues


async def test_an_evaluation_asks_no_reward_models() -> None:
    lookup: Any = Known(None)
    config = parse_eval({"experiment": EXPERIMENT})
    assert await find_reward_models(config, lookup, workspace(), []) == ()


@pytest.mark.parametrize(
    ("document", "key"),
    [
        (paid({"model": "a@1", "name": "x"}, {"model": "b@1", "name": "x"}), "[1].name"),
        (paid({"model": "a@1", "name": "x"}, rewards=[{"name": "x"}]), "[0].name"),
        (paid({"model": "a@1", "weight": float("inf")}), "[0].weight"),
        (paid({"model": "a b"}), "[0].model"),
        (paid({"model": "a@1", "name": "a-b"}), "[0].name"),
        (paid(*({"model": f"a@{n}"} for n in range(5))), ""),
        (
            {
                "experiment": {"model_path": "m", "dataset": "d"},
                "advanced": {"algorithm": "dpo", "reward_models": [{"model": "a@1"}]},
            },
            "",
        ),
    ],
)
def test_a_table_that_contradicts_the_rest_is_refused(document: dict[str, Any], key: str) -> None:
    assert f"advanced.reward_models{key}" in {issue.key for issue in run_issues(document)}


def test_four_are_allowed_and_a_group_has_room_for_them() -> None:
    assert not run_issues(paid(*({"model": f"a@{n}"} for n in range(4))))
    few = paid({"model": "a@1"})
    few["training"] = {"n_samples_per_prompt": 136}
    assert "training.n_samples_per_prompt" in {issue.key for issue in run_issues(few)}


async def test_the_artifacts_that_a_run_pins_are_kept_while_it_is_there() -> None:
    base = ModelRef(
        kind="checkpoint", name="r0@1", files={"a": ArtifactRef(uri="b", sha256="b" * 64, size=1)}
    )
    pinned, _ = await find(checkpoint(base=base))
    event = checkpoint().run.model_copy(update={"run": "r2", "reward_models": pinned})
    named = {ref.uri for ref in references(event)}
    assert {WEIGHTS.uri, "b"} <= named - collectable(event)
