"""Datasets of recorded samples over HTTP: what they say of their origin, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from producers.core.datasets import from_run
from producers.core.validation.trajectory_issues import staleness_warnings
from schemas.errors import InvalidConfig
from schemas.events import (
    DatasetRegistered,
    EvaluationRequested,
    GroupGraded,
    GroupsRequested,
    RunRequested,
)
from schemas.ids import GroupKey, Purpose
from schemas.sampling import ModelRef
from schemas.specs import GroupSpec, SampleEntry, Slot
from tests.kit.application import Application, application
from tests.kit.history import keep
from tests.kit.hostile_strings import hostile_strings
from tests.kit.recorded_groups import SECRET_LABEL, record_run, recorded_group
from tests.kit.signed_in import signed_in
from tests.kit.specs import config, template
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres

ANSWERS = [("good", 1.0), ("bad", 0.0), ("gone", None)]


def steps_of(count: int, *, groups: int = 4) -> Sequence[Any]:
    return [
        [recorded_group(ANSWERS, question=f"Say {step * groups + slot}") for slot in range(groups)]
        for step in range(count)
    ]


def test_a_fork_has_the_samples_of_its_own_steps_and_names_its_parent_for_earlier_ones() -> None:
    """A dataset of a fork after step 3 said that it was made of steps 1..8."""
    model = ModelRef(kind="scratch", name="qwen3-tiny")
    fork = from_run.SampleSource("r", "f", Purpose.TRAIN, model, 8, has_ended=True, after_step=3)
    assert from_run.range_of(fork, from_run.StepRange()) == (4, 8)
    with pytest.raises(InvalidConfig, match=r"within 4\.\.8.*got 1\.\.5; name its parent"):
        from_run.range_of(fork, from_run.StepRange(1, 5))
    with pytest.raises(InvalidConfig, match="no settled step yet"):
        from_run.range_of(replace(fork, last_step=3), from_run.StepRange())


@pytest.fixture
async def recorded(app: Application) -> Application:
    await record_run(app, steps_of(3))
    return app


async def make(app: Application, name: str, kind: str, **more: Any) -> Any:
    answer = await app.post(
        "/datasets/from-run", {"run": "first", "name": name, "as": kind, **more}
    )
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


async def refused(app: Application, status: int, **body: Any) -> str:
    asked = {"run": "first", "name": "d", "as": "sft", **body}
    answer = await app.post("/datasets/from-run", asked)
    assert answer.status_code == status, answer.text
    return str(answer.json()["detail"])


async def test_a_dataset_says_which_run_and_filters_it_comes_from(recorded: Application) -> None:
    made = await make(recorded, "good", "sft", min_reward=0.5, last_step=2)
    assert made["dataset"]["num_rows"] == made["made"]["rows"] == 8
    assert made["made"]["samples"] == 24
    assert made["made"]["samples_left_out"] == {"below_min_reward": 8, "failed": 8}
    assert made["made"]["left_out"] == [
        "8 samples have a reward below --min-reward",
        "8 samples failed",
    ]
    assert not made["made"]["has_ended"]
    shown = (await recorded.get("/datasets/good"))["dataset"]["origin"]
    assert (shown["owner"], shown["name"], shown["kind"]) == ("r1", "first", "sft")
    assert (shown["first_step"], shown["last_step"], shown["min_reward"]) == (1, 2, 0.5)
    assert shown["position"] == made["made"]["position"]
    preview = (await recorded.get("/datasets/good/preview"))["rows"]
    assert preview[0]["label"] == "good"
    assert preview[0]["prompt"] == [{"role": "user", "content": "Say 0"}]


@pytest.mark.parametrize("kind", ["sft", "preference", "trajectory"])
async def test_the_same_request_makes_the_same_content(recorded: Application, kind: str) -> None:
    made = [await make(recorded, "d", kind), await make(recorded, "d", kind)]
    other = await make(recorded, "other", kind)
    assert len({one["dataset"]["sha256"] for one in (*made, other)}) == 1
    assert made[0]["dataset"]["id"] == made[1]["dataset"]["id"]
    file = await recorded.api.get("/api/v1/datasets/d/content")
    assert file.status_code == 200
    assert SECRET_LABEL not in file.text


async def test_pages_of_groups_make_the_rows_of_one_page(
    recorded: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await make(recorded, "whole", "preference")
    assert whole["made"]["rows"] == 12
    monkeypatch.setattr(from_run, "PAGE", 5)
    paged = await make(recorded, "paged", "preference")
    assert paged["dataset"]["sha256"] == whole["dataset"]["sha256"]


async def test_other_rows_are_the_next_version_if_that_is_wanted(recorded: Application) -> None:
    await make(recorded, "d", "sft")
    assert "exists with other content" in await refused(recorded, 409, min_reward=1.0)
    made = await make(recorded, "d", "sft", min_reward=1.0, overwrite=True)
    assert made["dataset"]["version"] == 2


async def test_a_dry_run_counts_and_stores_nothing(recorded: Application) -> None:
    made = await make(recorded, "d", "trajectory", dry_run=True)
    assert made["dataset"] is None
    assert made["made"]["rows"] == 12
    assert (await recorded.api.get("/api/v1/datasets/d")).status_code == 404
    assert not list((recorded.services.settings.home / "uploads").iterdir())


async def test_a_request_that_keeps_nothing_says_which_rewards_there_are(
    recorded: Application,
) -> None:
    text = await refused(recorded, 400, min_reward=2.0)
    assert "rewards are from 0 to 1" in text
    assert "24 samples have a reward below --min-reward" in text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"first_step": 3, "last_step": 9}, "must be within 1..3"),
        ({"first_step": 3, "last_step": 2}, "must be within 1..3"),
        ({"as": "rl"}, "must be one of sft, preference, trajectory"),
        ({"name": "a b"}, "cannot name a dataset"),
        ({"min_reward": 1, "max_reward": 0}, "must be at most max_reward"),
        ({"as": "preference", "best_of_group": True}, "has no meaning for preference"),
        ({"reward_margin": 1}, "has no meaning for sft"),
        ({"limit": 0}, "must be from 1"),
        ({"limit": 3}, "a dataset needs at least 4"),
        ({"min_reward": "high"}, "must be a number"),
        ({"steps": "1..2"}, "unrecognized field steps"),
    ],
)
async def test_a_request_that_does_not_fit_is_refused_with_its_field(
    recorded: Application, body: dict[str, Any], text: str
) -> None:
    assert text in await refused(recorded, 400, **body)


async def test_a_run_without_graded_samples_is_refused(app: Application) -> None:
    await record_run(app, [])
    assert "has no settled step yet" in await refused(app, 400)
    assert "there is no run 'gone'" in await refused(app, 404, run="gone")


@pytest.mark.parametrize("kind", ["sft", "preference", "trajectory"])
async def test_hostile_answers_are_stored_as_they_are(app: Application, kind: str) -> None:
    hostile = [text for text in hostile_strings(60, storable=True) if text.strip()]
    groups = [
        recorded_group([(text, 1.0), ("plain", 0.0)], question=f"{text}?") for text in hostile
    ]
    await record_run(app, [groups])
    made = await make(app, "d", kind)
    rows = (await app.get("/datasets/d/preview", rows=100))["rows"]
    assert made["made"]["rows"] == len(hostile) * (2 if kind == "sft" else 1)
    answers = {
        "sft": lambda row: row["label"],
        "preference": lambda row: row["chosen"],
        "trajectory": lambda row: row["trajectory"]["samples"][0]["text"],
    }
    shown = [answers[kind](row) for row in rows[:: 2 if kind == "sft" else 1]]
    assert shown == hostile[: len(shown)]
    assert len(shown) >= 50


async def test_a_run_whose_grader_gave_no_reward_is_refused(app: Application) -> None:
    await record_run(app, [[recorded_group([("a", None), ("b", None)]) for _ in range(4)]])
    for kind in ("sft", "preference", "trajectory"):
        text = await refused(app, 400, **{"as": kind})
        assert "no sample in steps 1..1 has a reward" in text


async def record_evaluation(
    app: Application, *, model: ModelRef, run: str | None = None, temperature: float = 1.0
) -> None:
    """An evaluation with four groups."""
    params = template().params.model_copy(update={"temperature": temperature})
    asked = EvaluationRequested(
        evaluation="e1",
        eval_name="check",
        template=template().model_copy(update={"model": model, "params": params}),
        rows=(0, 1, 2, 3),
        run=run,
        step=1 if run else None,
    )
    await app.services.readmodel.names.take("evaluation", "check", "e1", scope="w")
    slots = tuple(Slot(slot=slot, row=slot) for slot in range(4))
    requested = GroupsRequested(
        owner="e1", purpose=Purpose.EVALUATE, step=0, slots=slots, template=asked.template
    )
    events: list[Any] = [asked, requested]
    for slot in range(4):
        group = str(GroupKey("e1", Purpose.EVALUATE, 0, slot))
        made = recorded_group(ANSWERS, group=group, question=f"Say {slot}")
        artifact = await keep(app, made.batch.model_dump_json().encode())
        spec = GroupSpec(group=group, row=slot, template=asked.template)
        entries = tuple(SampleEntry(index=n) for n in range(3))
        events.append(
            GroupGraded(spec=spec, artifact=artifact, entries=entries, grades=made.grades)
        )
    for event in events:
        [written] = await app.services.log.append([event], cause=uuid4())
    assert await app.services.readmodel.caught_up(written.cursor, timeout_s=60)


async def test_the_samples_of_an_evaluation_become_a_dataset(app: Application) -> None:
    await record_evaluation(app, model=ModelRef(kind="provider", name="gpt"))
    made = await make(app, "d", "preference", run="check")
    assert made["dataset"]["num_rows"] == 4
    assert made["dataset"]["origin"]["purpose"] == "evaluate"
    text = await refused(app, 400, **{"run": "check", "as": "trajectory"})
    assert "a provider's model, whose tokens are not recorded" in text
    assert "is an evaluation" in await refused(app, 400, run="check", first_step=1)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_greedy_samples_are_no_trajectories(app: Application, temperature: float) -> None:
    model = ModelRef(kind="scratch", name="qwen3-tiny")
    await record_evaluation(app, model=model, temperature=temperature)
    if temperature:
        made = await make(app, "d", "trajectory", run="check")
        assert made["dataset"]["origin"]["temperature"] == temperature
        return
    assert "was sampled greedily" in await refused(app, 400, **{"run": "check", "as": "trajectory"})


async def test_refuted_samples_are_left_out(app: Application) -> None:
    await record_run(app, steps_of(2), refuted=(1, 3))
    made = await make(app, "d", "trajectory")
    assert made["made"]["rows"] == 8
    rows = (await app.get("/datasets/d/preview", rows=100))["rows"]
    groups = [row["trajectory"]["group"] for row in rows]
    assert groups[:4] == [
        "r1-train-1-0-0",
        "r1-train-1-1-1000",
        "r1-train-1-2-0",
        "r1-train-1-3-1000",
    ]


async def test_a_validation_stays_held_out(app: Application) -> None:
    await record_run(app, steps_of(1))
    await record_evaluation(app, model=ModelRef(kind="scratch", name="qwen3-tiny"), run="r1")
    for ref in ("e1", "check"):
        assert "there is no run" in await refused(app, 404, run=ref)


async def test_a_dataset_of_a_run_belongs_to_the_workspace_of_who_made_it(app: Application) -> None:
    keys, ids = {}, {}
    for name in ("a", "b"):
        made = await app.post("/workspaces", {"url": "/repo", "name": name})
        ids[name] = made.json()["workspace"]["id"]
        keys[name] = await create_api_key(app, f"{name}-key", "admin", workspace=name)
    await record_run(app, steps_of(2), workspace=ids["a"])
    body = {"run": "first", "name": "d", "as": "trajectory"}
    path = "/api/v1/datasets/from-run"
    assert (await ask(app, "POST", path, keys["b"], json=body)).status_code == 404
    made = await ask(app, "POST", path, keys["a"], json=body)
    assert made.status_code == 201, made.text
    identity = made.json()["dataset"]["id"]
    assert (await ask(app, "GET", f"/api/v1/datasets/{identity}", keys["b"])).status_code == 404
    assert (await ask(app, "GET", f"/api/v1/datasets/{identity}", keys["a"])).status_code == 200
    listed = await app.get("/audit", limit=50)
    asked = [one["status"] for one in listed["audit"] if one["route"] == "/datasets/from-run"]
    assert asked == [201, 404]


async def test_a_deletion_of_the_run_leaves_its_dataset(recorded: Application) -> None:
    """The rows hold the tokens, so nothing of the run is needed."""
    made = await make(recorded, "d", "trajectory")
    await recorded.database.durable.execute("delete from artifacts")
    found = await recorded.services.artifacts.get_artifact(
        (await registered(recorded, made["dataset"]["id"])).dataset.content
    )
    assert found.count(b"\n") == 12


async def registered(app: Application, dataset: str) -> DatasetRegistered:
    [event] = await app.recorded(dataset, DatasetRegistered)
    assert isinstance(event, DatasetRegistered)
    return event


async def test_a_trajectory_dataset_records_its_model_and_temperature(
    recorded: Application,
) -> None:
    made = await make(recorded, "d", "trajectory")
    origin = (await registered(recorded, made["dataset"]["id"])).origin
    assert origin is not None
    assert (origin.model, origin.temperature, origin.num_samples) == (
        ModelRef(kind="scratch", name="qwen3-tiny"),
        1.0,
        3,
    )
    assert (origin.oldest_version, origin.newest_version) == (0, 0)


OFFLINE: dict[str, dict[str, Any]] = {
    "experiment": {"model_path": "scratch:qwen3-tiny", "dataset": "d"},
    "training": {"rollout_batch_size": 4},
    "advanced": {"execution_mode": "offline", "max_steps": 2},
}


def offline(**changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {**OFFLINE.get(name, {}), **changes.get(name, {})} for name in {*OFFLINE, *changes}
    }


async def test_a_run_on_recorded_groups_starts_without_a_rollout(recorded: Application) -> None:
    await make(recorded, "d", "trajectory")
    answer = await recorded.post("/runs", {"config": offline(), "name": "again"})
    assert answer.status_code == 201, answer.text
    [requested] = await recorded.recorded(answer.json()["run"]["id"], RunRequested)
    assert isinstance(requested, RunRequested)
    assert requested.workspace is None
    assert not requested.warnings


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"sampling": {"rollout_temperature": 0.5}}, "sampling.rollout_temperature", "must be 1,"),
        ({"training": {"n_samples_per_prompt": 4}}, "training.n_samples_per_prompt", "must be 3,"),
        ({"training": {"rollout_batch_size": 13}}, "training.rollout_batch_size", "at most 12"),
        ({"training": {"max_prompt_length": 64}}, "training.max_prompt_length", "is not read"),
        ({"advanced": {"algorithm": "ppo"}}, "advanced.algorithm", "must be one of grpo"),
        ({"advanced": {"algorithm": "gdpo"}}, "advanced.algorithm", "must be one of grpo"),
        ({"advanced": {"filter_groups": True}}, "advanced.filter_groups", "no meaning in offline"),
        ({"advanced": {"attest": True}}, "advanced.attest", "no meaning in offline"),
        ({"advanced": {"max_turns": 2}}, "advanced.max_turns", "is not read"),
        (
            {"advanced": {"execution_mode": "sync"}},
            "experiment.dataset",
            "recorded groups of first",
        ),
        (
            {"advanced": {"execution_mode": "sync", "algorithm": "sft"}},
            "experiment.dataset",
            "recorded groups of first",
        ),
        (
            {"experiment": {"model_path": "scratch:qwen3-2m"}},
            "experiment.model_path",
            "must have the tokenizer of qwen3-tiny",
        ),
        (
            {"advanced": {"validation_dataset": "d"}},
            "advanced.validation_dataset",
            "has recorded groups",
        ),
    ],
)
async def test_a_run_that_does_not_fit_the_recorded_groups_is_refused(
    recorded: Application, changes: dict[str, Any], key: str, text: str
) -> None:
    await make(recorded, "d", "trajectory")
    answer = await recorded.post("/runs", {"config": offline(**changes)})
    assert answer.status_code == 400, answer.text
    issues = {one["key"]: one["message"] for one in answer.json()["issues"]}
    assert text in issues[key], issues


async def test_another_dataset_cannot_be_trained_offline(recorded: Application) -> None:
    await make(recorded, "d", "sft")
    answer = await recorded.post("/runs", {"config": offline()})
    assert "must have recorded groups in offline mode" in answer.text


async def test_a_newer_policy_than_the_model_of_the_run_is_warned_of(app: Application) -> None:
    await record_run(app, steps_of(2))
    made = await make(app, "d", "trajectory")
    event = await registered(app, made["dataset"]["id"])
    assert event.origin is not None
    origin = event.origin.model_copy(update={"newest_version": 7, "oldest_version": 3})
    model = ModelRef(kind="scratch", name="qwen3-tiny")
    stale = event.model_copy(update={"origin": origin})
    [warning] = staleness_warnings(config(), stale, model)
    assert "sampled by versions 3 to 7 of first" in warning
    assert "advanced.correction" in warning
    assert not list(staleness_warnings(config(), event, model))


async def test_the_page_of_a_dataset_names_its_run_and_shows_recorded_answers(
    recorded: Application,
) -> None:
    await make(recorded, "d", "trajectory", last_step=2)
    async with signed_in(recorded) as browser:
        page = (await browser.get("/datasets/d")).text
    assert '<a href="/runs/r1">first</a>, steps 1 to 2, as trajectory' in page
    assert "reward 1</div><pre>good</pre>" in page


async def test_rows_beyond_the_quota_are_not_stored(database_url: str, tmp_path: Path) -> None:
    limits = {"HEADRACE_QUOTAS": "stored_bytes=2000"}
    async with application(database_url, tmp_path / "home", environ=limits) as app:
        made = await app.post("/workspaces", {"url": "/repo", "name": "a"})
        key = await create_api_key(app, "a-key", "admin", workspace="a")
        await record_run(app, steps_of(3), workspace=made.json()["workspace"]["id"])
        body = {"run": "first", "name": "d", "as": "trajectory"}
        full = await ask(app, "POST", "/api/v1/datasets/from-run", key, json=body)
        assert full.status_code == 429, full.text
        small = await ask(
            app, "POST", "/api/v1/datasets/from-run", key, json={**body, "as": "sft", "limit": 4}
        )
        assert small.status_code == 201, small.text
        assert not list((app.services.settings.home / "uploads").iterdir())
