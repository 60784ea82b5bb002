"""Submitting runs: which requests are refused, which events are appended, and the effect of
submitting twice."""

import json
from dataclasses import replace
from datetime import UTC, date
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.operations.maintenance.dependents import Holders
from infra.settings.settings import Settings, VllmSettings
from producers.core.submit import SubmitRequest
from producers.http.routes import runs
from schemas.errors import InvalidConfig
from schemas.events import CommitRequested, EvaluationCompleted, RunRequested, WorkspaceSynced
from schemas.ids import run_stream, workspace_stream
from schemas.specs import DiscoveredRollout, Entrypoint
from tests.kit.application import Application, rows
from tests.kit.hub import QWEN3_06B, hub
from tests.kit.specs import ref
from tests.kit.story import checkpoint

pytestmark = pytest.mark.postgres

SHAPE = "scratch:qwen3-tiny"


def config(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A good GRPO config on `numbers`; sections are merged over it."""
    made: dict[str, dict[str, Any]] = {
        "experiment": {
            "rollout": "say",
            "entrypoint": "main.py",
            "model_path": SHAPE,
            "dataset": "numbers",
        },
        "training": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
    }
    for name, values in sections.items():
        made.setdefault(name, {}).update(values)
    return made


@pytest.fixture
async def ready(app: Application) -> Application:
    """An application that has a dataset and a workspace."""
    assert (await app.upload("numbers", rows(8))).status_code == 200
    made = await app.post("/workspaces", {"url": "/repo", "name": "w"})
    assert made.status_code == 201, made.text
    return app


async def test_a_dora_is_refused_where_vllm_samples(ready: Application) -> None:
    asked = SubmitRequest(config(advanced={"lora_variant": "dora"}))
    await ready.services.submitter.resolve_run(asked)
    vllm = VllmSettings(urls=("http://sampler:8000",), adapters=Path("/adapters"))
    services = replace(ready.services, settings=replace(ready.services.settings, vllm=vllm))
    await services.submitter.resolve_run(SubmitRequest(config()))
    with pytest.raises(InvalidConfig) as refused:
        await services.submitter.resolve_run(asked)
    (issue,) = refused.value.issues
    assert issue.key == "advanced.lora_variant"
    assert "HEADRACE_SAMPLER=torch" in issue.message


async def test_full_tuning_is_refused_where_vllm_takes_adapters_only(ready: Application) -> None:
    """Servers that others started are taken at the operator's word."""
    asked = SubmitRequest(config(advanced={"tuning": "full"}))
    started = {"HEADRACE_SAMPLER": "vllm", "HEADRACE_VLLM_MODEL": "m"}
    others = {"HEADRACE_SAMPLER": "vllm=http://sampler:8000"}
    full = {"HEADRACE_VLLM_TUNING": "full"}
    for said in ({}, started, others, {**started, **full}, {**others, **full}):
        vllm = Settings.load(said).vllm
        services = replace(ready.services, settings=replace(ready.services.settings, vllm=vllm))
        if not said or "HEADRACE_VLLM_TUNING" in said:
            await services.submitter.resolve_run(asked)
            continue
        with pytest.raises(InvalidConfig) as refused:
            await services.submitter.resolve_run(asked)
        (issue,) = refused.value.issues
        assert issue.key == "advanced.tuning"
        assert "HEADRACE_VLLM_TUNING=full" in issue.message


async def test_a_run_is_requested_with_the_push_that_brings_its_commit(ready: Application) -> None:
    made = await ready.post("/runs", {"config": config(experiment={"branch": "dev"})})
    assert made.status_code == 201, made.text
    run = made.json()["run"]
    assert run["status"] == "pending"
    assert run["phase"] == "provision"
    assert run["config"]["experiment"]["dataset"] == "numbers"
    assert run["workspace_name"] == "w"
    log = ready.services.log
    streams = [run_stream(run["id"]), workspace_stream(run["workspace"])]
    loaded = await log.load(dict.fromkeys(streams, 0))
    requested, pushed = loaded[streams[0]][0].event, loaded[streams[1]][-1].event
    assert isinstance(requested, RunRequested)
    assert requested.model.name == "qwen3-tiny"
    assert isinstance(pushed, CommitRequested)
    assert pushed.requester == streams[0]
    assert pushed.commit.branch == "dev"
    assert loaded[streams[0]][0].cursor < loaded[streams[1]][-1].cursor


async def test_the_day_of_the_submit_is_recorded_by_the_clock_that_stamps_events(
    ready: Application,
) -> None:
    made = await ready.post("/runs", {"config": config()})
    stream = run_stream(made.json()["run"]["id"])
    recorded = (await ready.services.log.load({stream: 0}))[stream][0]
    assert isinstance(recorded.event, RunRequested)
    assert recorded.event.date is not None
    stamped = recorded.time.astimezone(UTC).date()
    assert 0 <= (stamped - date.fromisoformat(recorded.event.date)).days <= 1


@pytest.mark.parametrize("day", ["2026-02-30", "22 Nov 2026", "20261122", 20261122])
async def test_a_day_that_is_none_is_refused(ready: Application, day: object) -> None:
    refused = await ready.post("/runs", {"config": config(advanced={"date": day})})
    assert refused.status_code == 400
    assert "advanced.date" in refused.text


async def test_the_precision_is_part_of_which_model_it_is(ready: Application) -> None:
    for precision in ("float32", "bfloat16"):
        made = await ready.post("/runs", {"config": config(advanced={"precision": precision})})
        stream = run_stream(made.json()["run"]["id"])
        requested = (await ready.services.log.load({stream: 0}))[stream][0].event
        assert isinstance(requested, RunRequested)
        assert requested.model.dtype == precision


async def test_asking_again_is_the_same_run_and_other_things_are_refused(
    ready: Application,
) -> None:
    first = await ready.post("/runs", {"config": config()}, Idempotency_Key="k")
    again = await ready.post("/runs", {"config": config()}, Idempotency_Key="k")
    assert first.status_code == again.status_code == 201
    assert first.json()["run"]["id"] == again.json()["run"]["id"]
    assert (await ready.get("/runs"))["total_count"] == 1
    other = await ready.post("/runs", {"config": config(advanced={"seed": 1})}, Idempotency_Key="k")
    assert other.status_code == 409
    assert other.headers["content-type"] == "application/problem+json"
    assert other.json()["code"] == "CONFLICT"


async def runs_of_a_request_whose_answer_was_lost(ready: Application) -> int:
    """A client whose connection broke sends its request again, as every client of ours does."""
    for _ in range(2):
        made = await ready.post("/runs", {"config": config()}, Idempotency_Key="k")
        assert made.status_code == 201, made.text
    return int((await ready.get("/runs"))["total_count"])


async def test_a_request_whose_answer_was_lost_is_one_run(ready: Application) -> None:
    assert await runs_of_a_request_whose_answer_was_lost(ready) == 1


async def test_twin_without_the_key_it_is_two_runs(
    ready: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "idempotency_key", lambda request: uuid4().hex)
    assert await runs_of_a_request_whose_answer_was_lost(ready) == 2


async def test_a_refused_request_can_be_corrected_and_repeated(ready: Application) -> None:
    for change in ({"training": {"lr": -1}}, {"env": {"BIG": "x" * 70_000}}):
        wrong = {"config": config(**change), "name": "mine"}
        refused = await ready.post("/runs", wrong, Idempotency_Key=next(iter(change)))
        assert refused.status_code == 400
    mended = {"config": config(), "name": "mine"}
    made = await ready.post("/runs", mended, Idempotency_Key="training")
    assert made.status_code == 201, made.text


async def test_a_run_can_go_on_from_a_directory_or_a_checkpoint(
    ready: Application, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = await ready.post("/runs", {"config": config(), "from": str(tmp_path)})
    assert made.status_code == 201, made.text
    requested = await ready.services.lookup.run(made.json()["run"]["id"])
    assert (requested.model.kind, requested.model.name) == ("directory", str(tmp_path))
    assert made.json()["run"]["model"] == str(tmp_path)
    await ready.append([checkpoint(requested.run, 4, ref("manifest"))])
    more = await ready.post("/runs", {"config": config(), "from": f"{requested.run_name}@best"})
    assert more.status_code == 201, more.text
    model = (await ready.services.lookup.run(more.json()["run"]["id"])).model
    assert (model.kind, model.name) == ("checkpoint", f"{requested.run}@4")
    assert set(model.files) == {"adapter_config.json", "adapter_model.safetensors"}


async def test_names_are_invented_kept_and_refused_when_taken(ready: Application) -> None:
    invented = await ready.post("/runs", {"config": config()})
    assert invented.json()["run"]["name"].count("-") == 2
    named = await ready.post("/runs", {"config": config(), "name": "mine"})
    assert named.json()["run"]["name"] == "mine"
    taken = await ready.post("/runs", {"config": config(), "name": "mine"})
    assert taken.status_code == 409
    assert "mine" in taken.json()["detail"]
    bad = await ready.post("/runs", {"config": config(), "name": "a@b"})
    assert bad.status_code == 400
    assert (await ready.get("/runs/mine"))["run"]["id"] == named.json()["run"]["id"]


async def test_an_id_is_no_name_so_that_nobody_takes_that_of_another_run(
    ready: Application,
) -> None:
    run = (await ready.post("/runs", {"config": config()})).json()["run"]["id"]
    dataset = (await ready.get("/datasets/numbers"))["dataset"]["id"]
    evaluation = {key: config()[key] for key in ("experiment",)}
    requests = [
        ("/runs", {"config": config(), "name": run}),
        (f"/runs/{run}/rename", {"name": run}),
        ("/evals", {"config": evaluation, "name": f"{run}v4"}),
        ("/datasets", {"name": dataset, "file_name": "rows.jsonl"}),
    ]
    for path, body in requests:
        refused = await ready.post(path, body)
        assert refused.status_code in (400, 409), refused.text
        assert "could be the id of another" in refused.json()["detail"]


async def test_commands_reach_the_run_that_is_shown_when_another_has_its_id_as_a_name(
    ready: Application,
) -> None:
    """Names of this form are refused, but older versions did not."""
    run = (await ready.post("/runs", {"config": config()})).json()["run"]["id"]
    other = (await ready.post("/runs", {"config": config()})).json()["run"]["id"]
    await ready.services.readmodel.names.take("run", run, other)
    assert (await ready.get(f"/runs/{run}"))["run"]["id"] == run
    tagged = await ready.post(f"/runs/{run}/tags", {"add": ["a"]})
    assert tagged.json()["run"]["id"] == run


@pytest.mark.parametrize(
    ("change", "key", "says", "meant"),
    [
        ({"training": {"lr": -1}}, "training.lr", "greater than 0", None),
        ({"training": {"learn": 1}}, "training.learn", "unrecognized", None),
        ({"trainin": {"lr": 1}}, "trainin", "unrecognized section", "training"),
        ({"experiment": {"dataset": "number"}}, "experiment.dataset", "no dataset", "numbers"),
        (
            {"experiment": {"model_path": "scratch:qwen3-tin"}},
            "experiment.model_path",
            "no shape",
            SHAPE,
        ),
        ({"experiment": {"model_path": "gone@last"}}, "experiment.model_path", "gone", None),
        ({"experiment": {"model_path": "/nowhere"}}, "experiment.model_path", "/nowhere", None),
        ({"experiment": {"model_path": "/tmp"}}, "experiment.model_path", "config.json", None),
        ({"advanced": {"gae_lambda": 0.9}}, "advanced.gae_lambda", "no meaning for grpo", None),
        ({"sampling": {"rollout_top_p": 0.9}}, "sampling.rollout_top_p", "1.0", None),
        ({"training": {"rollout_batch_size": 9}}, "training.rollout_batch_size", "at most 8", None),
        (
            {
                "training": {"rollout_batch_size": 3},
                "advanced": {"curriculum": {"oversampling_factor": 3}},
            },
            "advanced.curriculum.oversampling_factor",
            "at most 8 groups, the rows of numbers, got 9; lower it",
            None,
        ),
        (
            {"advanced": {"curriculum": {"min_pass_rate": 1}}},
            "advanced.curriculum.min_pass_rate",
            "less than 1",
            None,
        ),
        ({"advanced": {"min_pass_rate": 0.1}}, "advanced.min_pass_rate", "", "advanced.curriculum"),
        (
            {"training": {"n_samples_per_prompt": 1000}},
            "training.n_samples_per_prompt",
            "at most",
            None,
        ),
        ({"checkpoints": {"eval_interval": 5}}, "checkpoints.eval_interval", "validation", None),
        ({"advanced": {"validation_samples": 2}}, "advanced.validation_samples", "dataset", None),
        (
            {"advanced": {"validation_temperature": 0.5}},
            "advanced.validation_temperature",
            "needs advanced.validation_dataset",
            None,
        ),
        (
            {"advanced": {"validation_dataset": "numbers", "validation_samples": 500}},
            "advanced.validation_samples",
            "at most 136",
            None,
        ),
        (
            {"advanced": {"validation_dataset": "x"}},
            "advanced.validation_dataset",
            "no dataset",
            None,
        ),
        ({"secrets": {"required": ["KEY"]}}, "secrets.required", "is not set", None),
        (
            {"training": {"max_response_length": 2000}},
            "training.max_response_length",
            "must be at most 1023, got 2000: the model has 1024 positions",
            None,
        ),
    ],
)
async def test_an_invalid_config_is_refused_with_its_key(
    ready: Application,
    change: dict[str, dict[str, Any]],
    key: str,
    says: str,
    meant: str | None,
) -> None:
    refused = await ready.post("/runs", {"config": config(**change)})
    assert refused.status_code == 400, refused.text
    issues = {issue["key"]: issue for issue in refused.json()["issues"]}
    assert says in issues[key]["message"]
    assert issues[key]["did_you_mean"] == meant
    assert (await ready.get("/runs"))["total_count"] == 0


async def a_taught_run(app: Application, **advanced: Any) -> str:
    """A run with a checkpoint. Returns its id."""
    changed = {"advanced": advanced, "training": {"n_samples_per_prompt": 2}}
    return await a_saved_run(app, config(**changed))


async def a_saved_run(app: Application, asked: dict[str, Any]) -> str:
    """A run `old` of this config with a checkpoint. Returns its id."""
    made = await app.post("/runs", {"config": asked, "name": "old"})
    assert made.status_code == 201, made.text
    run: str = made.json()["run"]["id"]
    saved = checkpoint(run, 3, ref("manifest"))
    requested = (await app.services.lookup.run(run)).model
    spec = saved.spec.model_copy(update={"model": requested})
    await app.append([saved.model_copy(update={"spec": spec})])
    return run


def distilled(teacher: str, **advanced: Any) -> dict[str, Any]:
    return config(advanced={"algorithm": "distill", "teacher": teacher, **advanced})


async def test_a_teacher_is_pinned_and_an_adapter_on_the_run_s_own_base_stays_one(
    ready: Application,
) -> None:
    run = await a_taught_run(ready, lora_alpha=4.0)
    made = await ready.post("/runs", {"config": distilled("old@last")})
    assert made.status_code == 201, made.text
    requested = await ready.services.lookup.run(made.json()["run"]["id"])
    teacher = requested.teacher
    assert teacher is not None
    assert (teacher.name, teacher.checkpoint) == ("old@3", f"{run}@3")
    assert (teacher.model, teacher.lora_alpha) == (requested.model, 4.0)
    assert teacher.weights is not None
    other = await ready.post("/runs", {"config": distilled("old@last", seed=9)})
    teacher = (await ready.services.lookup.run(other.json()["run"]["id"])).teacher
    assert teacher is not None
    assert teacher.weights is None, "another seed is another base"
    assert (teacher.model.kind, teacher.model.name) == ("checkpoint", f"{run}@3")
    assert await Holders(ready.database).runs_from(run) == [
        made.json()["run"]["name"],
        other.json()["run"]["name"],
    ]


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ("gone@last", "there is no run 'gone'"),
        ("old@7", "has no checkpoint 7; it has: 3"),
        (SHAPE, "is the model that the run begins with"),
        ("scratch:qwen3-2m", "'scratch:qwen3-2m' has another vocabulary than the model of the run"),
        ("/nowhere", "/nowhere"),
        ("a b", "must match"),
    ],
)
async def test_a_teacher_that_cannot_teach_is_refused_by_name(
    ready: Application, teacher: str, says: str
) -> None:
    await a_taught_run(ready)
    refused = await ready.post("/runs", {"config": distilled(teacher)})
    assert refused.status_code == 400, refused.text
    (issue,) = [i for i in refused.json()["issues"] if i["key"] == "advanced.teacher"]
    assert says in issue["message"]


SERVER = {"teacher_base_url": "http://10.0.0.5:8000/v1"}


async def test_a_teacher_on_a_server_is_pinned_with_the_name_of_its_key(
    ready: Application,
) -> None:
    """Its address is the operator's decision, and its key a secret. Nothing is asked at submit."""
    asked = distilled("provider:big", **SERVER, teacher_api_key_secret="TEACHER_KEY")
    refused = await ready.post("/runs", {"config": asked, "workspace": "w"})
    issues = {issue["key"]: issue["message"] for issue in refused.json()["issues"]}
    way_out = "HEADRACE_NETWORK_ALLOW=w=10.0.0.5:8000, or name a checkpoint as advanced.teacher"
    assert way_out in issues["advanced.teacher_base_url"]
    assert "headrace secret set TEACHER_KEY" in issues["advanced.teacher_api_key_secret"]
    assert len(issues) == 2


@pytest.mark.parametrize(
    ("advanced", "key", "says"),
    [
        ({}, "teacher_base_url", "is missing; set it to the vLLM server that has 'provider:big'"),
        ({"teacher_base_url": "10.0.0.5:8000"}, "teacher_base_url", "is not the base URL of a"),
        ({"teacher_base_url": "http://u:p@h/v1"}, "teacher_base_url", "is not the base URL of a"),
        (
            {**SERVER, "teacher_api_key_secret": "OPENAI_API_KEY"},
            "teacher_api_key_secret",
            "OPENAI_API_KEY is a key for api.openai.com and is not sent to http://10.0.0.5:8000/v1",
        ),
    ],
)
async def test_a_teacher_on_a_server_that_cannot_be_asked_is_refused(
    ready: Application, advanced: dict[str, Any], key: str, says: str
) -> None:
    asked = distilled("provider:big", **advanced)
    refused = await ready.post("/runs", {"config": asked, "workspace": "w"})
    assert refused.status_code == 400, refused.text
    issues = {issue["key"]: issue["message"] for issue in refused.json()["issues"]}
    assert says in issues[f"advanced.{key}"]


async def test_a_reward_model_is_no_teacher(ready: Application) -> None:
    """Its adapter fits on the run's own base model, but a head reads what that learned."""
    pair = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    await ready.upload("pairs", f"{pair}\n" * 4)
    scored = {
        "experiment": {"model_path": SHAPE, "dataset": "pairs"},
        "advanced": {"algorithm": "reward_model", "batch_size": 4},
    }
    await a_saved_run(ready, scored)
    refused = await ready.post("/runs", {"config": distilled("old@last")})
    assert refused.status_code == 400, refused.text
    (issue,) = [i for i in refused.json()["issues"] if i["key"] == "advanced.teacher"]
    assert "old@3 is a reward model, which scores answers and writes none" in issue["message"]


async def test_a_teacher_that_the_hub_does_not_have_is_refused_at_submit(
    ready: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub(Qwen__Qwen3=QWEN3_06B) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        refused = await ready.post("/runs", {"config": distilled("Qwen/Qwne3")})
        assert refused.status_code == 400, refused.text
        (issue,) = [i for i in refused.json()["issues"] if i["key"] == "advanced.teacher"]
        assert "Qwen/Qwne3" in issue["message"]
        made = await ready.post("/runs", {"config": distilled("Qwen/Qwen3"), "dry_run": True})
        assert made.status_code == 200, made.text


async def test_a_hint_may_name_the_ground_truth_only_where_rows_have_one(
    ready: Application,
) -> None:
    bare = "".join(f'{{"metadata": {{"n": {n}}}}}\n' for n in range(8))
    assert (await ready.upload("bare", bare)).status_code == 200
    asked = distilled(SHAPE, teacher_hint="It is {ground_truth}.")
    assert (await ready.post("/runs", {"config": asked})).status_code == 201, (
        "its own model may hint"
    )
    asked["experiment"]["dataset"] = "bare"
    refused = await ready.post("/runs", {"config": asked})
    (issue,) = refused.json()["issues"]
    assert issue["key"] == "advanced.teacher_hint"
    assert "names {ground_truth}, and bare has no such column" in issue["message"]


async def test_the_workspace_must_be_known_or_the_only_one(ready: Application) -> None:
    gone = await ready.post("/runs", {"config": config(), "workspace": "gone"})
    assert gone.status_code == 404
    assert "gone" in gone.json()["detail"]
    assert (await ready.post("/workspaces", {"url": "/repo", "name": "w2"})).status_code == 201
    unclear = await ready.post("/runs", {"config": config()})
    assert unclear.status_code == 400
    assert "w, w2" in unclear.json()["detail"]
    named = await ready.post("/runs", {"config": config(), "workspace": "w2"})
    assert named.status_code == 201


async def test_sft_needs_no_workspace_but_labels(app: Application) -> None:
    await app.upload("numbers", rows(8))
    bare = "".join(f'{{"metadata": {{"n": {n}}}}}\n' for n in range(4))
    assert (await app.upload("bare", bare)).status_code == 200
    sft: dict[str, dict[str, Any]] = {
        "experiment": {"model_path": SHAPE, "dataset": "numbers"},
        "advanced": {"algorithm": "sft", "batch_size": 4},
    }
    made = await app.post("/runs", {"config": sft})
    assert made.status_code == 201, made.text
    assert made.json()["run"]["workspace"] is None
    talk = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    await app.upload("talks", f"{talk}\n" * 4)
    sft["experiment"]["dataset"] = "talks"
    assert (await app.post("/runs", {"config": sft})).status_code == 201
    sft["experiment"]["dataset"] = "bare"
    refused = await app.post("/runs", {"config": sft})
    assert refused.json()["issues"][0]["key"] == "experiment.dataset"


async def test_a_dry_run_checks_the_name_as_the_submit_does(ready: Application) -> None:
    tried = {"config": config(), "dry_run": True}
    assert (await ready.post("/runs", {**tried, "name": "mine"})).status_code == 200
    made = await ready.post("/runs", {"config": config(), "name": "mine"})
    assert made.status_code == 201, "the dry run reserved nothing"
    for name, status in (("my run/1", 400), ("mine", 409), (made.json()["run"]["id"], 409)):
        refusals = []
        for body in (tried, {"config": config()}):
            refused = await ready.post("/runs", {**body, "name": name})
            assert refused.status_code == status
            refusals.append(refused.json()["detail"])
        assert refusals[0] == refusals[1]
    assert (
        "headrace train rename mine NEW"
        in (await ready.post("/runs", {**tried, "name": "mine"})).json()["detail"]
    )


async def test_a_dry_run_shows_and_appends_nothing(ready: Application) -> None:
    shown = await ready.post(
        "/runs", {"config": config(training={"total_epochs": 3}), "dry_run": True}
    )
    assert shown.status_code == 200, shown.text
    said = shown.json()
    assert said["total_steps"] == 12
    assert said["config"]["advanced"]["lora_rank"] == 16
    assert said["estimates"]["memory_bytes"] > 0
    assert said["issues"] == []
    assert (await ready.get("/runs"))["total_count"] == 0


async def test_a_dry_run_counts_a_teacher_that_is_loaded_beside_the_model(
    ready: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    seconds, memory = [], []
    with hub(Qwen__Qwen3=QWEN3_06B) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        for teacher in ("self", "Qwen/Qwen3"):
            wanted = distilled(teacher, teacher_hint="h")
            answer = await ready.post("/runs", {"config": wanted, "dry_run": True})
            assert answer.status_code == 200, answer.text
            seconds.append(answer.json()["estimates"]["step_s"])
            memory.append(answer.json()["estimates"]["memory_bytes"])
    assert memory[1] - memory[0] > 4 * 500_000_000
    assert seconds[1] > 100 * seconds[0]


async def test_a_dry_run_estimates_a_model_of_the_hub_and_a_misspelt_one_is_refused(
    ready: Application, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub(Qwen__Qwen3=QWEN3_06B) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        known = config(experiment={"model_path": "Qwen/Qwen3"})
        shown = await ready.post("/runs", {"config": known, "dry_run": True})
        assert shown.status_code == 200, shown.text
        assert shown.json()["estimates"]["parameters"] > 590_000_000
        gone = config(experiment={"model_path": "Qwen/Qwne3"})
        for path in ("/runs", "/evals"):
            body = {"config": gone if path == "/runs" else {"experiment": gone["experiment"]}}
            refused = await ready.post(path, body)
            assert refused.status_code == 400
            (issue,) = refused.json()["issues"]
            assert issue["key"] == "experiment.model_path"
            assert "has no model Qwen/Qwne3" in issue["message"]


async def test_characters_that_the_vocabulary_lacks_are_warned_of(ready: Application) -> None:
    plain = (await ready.post("/runs", {"config": config()})).json()
    assert plain["warnings"] == []
    euros = "".join(
        json.dumps({"user_prompt": f"{n} € für 作", "ground_truth": str(n)}) + "\n"
        for n in range(4)
    )
    assert (await ready.upload("euros", euros)).status_code == 200
    wanted = {"config": config(experiment={"dataset": "euros"})}
    made = await ready.post("/runs", wanted, Idempotency_Key="k")
    (warning,) = made.json()["warnings"]
    assert "no symbol for 3 characters of euros" in warning
    assert "'ü' '€' '作'" in warning
    again = await ready.post("/runs", wanted, Idempotency_Key="k")
    assert again.json()["warnings"] == [warning]
    shown = await ready.post("/runs", {**wanted, "dry_run": True})
    assert shown.json()["warnings"] == [warning]
    logs = (await ready.get(f"/runs/{made.json()['run']['id']}/logs"))["logs"]
    assert warning in [entry["message"] for entry in logs]
    evaluated = await ready.post(
        "/evals", {"config": {"experiment": wanted["config"]["experiment"]}}
    )
    rows = "1 of the 4 rows of euros are evaluated, a tenth; set evaluation.limit to evaluate more"
    assert sorted(evaluated.json()["warnings"]) == sorted([rows, warning])


async def looked_into(ready: Application, sha: str, *names: str, broken: str | None = None) -> None:
    """A commit of the workspace that was synced with all its rollouts."""
    workspace = await ready.services.workspaces.find_workspace("w")
    stream = workspace_stream(workspace.id)
    pushed = (await ready.services.log.load({stream: 0}))[stream][0]
    found = tuple(
        DiscoveredRollout(
            entrypoint=Entrypoint(rollout=name), error="main.py:3" if name == broken else None
        )
        for name in names
    )
    synced = WorkspaceSynced(
        workspace=workspace.id,
        request=pushed.id,
        commit=sha,
        snapshot=ref("snapshot"),
        rollouts=found,
    )
    await ready.append([synced])


async def test_a_rollout_that_its_commit_lacks_is_refused_at_submit(ready: Application) -> None:
    sha = "ab" * 20
    await looked_into(ready, sha, "say", "says", "broken", broken="broken")
    pinned = {"commit_sha": sha[:12]}
    made = await ready.post("/runs", {"config": config(experiment=pinned)})
    assert made.status_code == 201, made.text
    for name, says, meant in (("sya", "does not have; it has: say, says", "say"),):
        wrong = config(experiment={**pinned, "rollout": name})
        refused = await ready.post("/runs", {"config": wrong})
        assert refused.status_code == 400
        (issue,) = refused.json()["issues"]
        assert issue["key"] == "experiment.rollout"
        assert says in issue["message"]
        assert issue["did_you_mean"] == meant
    bad = await ready.post("/runs", {"config": config(experiment={**pinned, "rollout": "broken"})})
    assert "main.py:3" in bad.json()["issues"][0]["message"]


async def test_a_branch_may_have_a_rollout_that_was_not_seen_yet(ready: Application) -> None:
    await looked_into(ready, "ab" * 20, "say")
    made = await ready.post("/runs", {"config": config(experiment={"rollout": "new"})})
    assert made.status_code == 201, made.text
    (warning,) = made.json()["warnings"]
    assert "'new', which commit abababababab does not have" in warning
    assert "the run fetches the newest one, which must have it" in warning
    assert (await ready.post("/runs", {"config": config()})).json()["warnings"] == []


async def test_a_checkpoint_has_the_context_of_the_model_its_run_began_with(
    ready: Application,
) -> None:
    made = (await ready.post("/runs", {"config": config()})).json()["run"]
    await ready.append([checkpoint(made["id"], 4, ref("manifest"))])
    long = config(training={"max_prompt_length": 4096})
    refused = await ready.post("/runs", {"config": long, "from": f"{made['name']}@4"})
    assert refused.json()["issues"][0]["key"] == "training.max_prompt_length"


async def test_an_evaluation_draws_its_rows_from_the_seed(ready: Application) -> None:
    await ready.upload("many", rows(40))
    wanted = {"experiment": config(experiment={"dataset": "many"})["experiment"]}
    first = await ready.post("/evals", {"config": wanted})
    assert first.status_code == 201, first.text
    shown = first.json()["eval"]
    assert shown["status"] == "pending"
    assert shown["total"] == 4
    second = await ready.post("/evals", {"config": wanted})
    drawn = [
        (await ready.services.lookup.evaluation(made.json()["eval"]["id"])).rows
        for made in (first, second)
    ]
    assert drawn[0] == drawn[1]
    limited = {**wanted, "evaluation": {"limit": 5}}
    made = await ready.post("/evals", {"config": limited, "name": "five"})
    assert (await ready.services.lookup.evaluation("five")).rows == (0, 1, 2, 3, 4)
    assert made.json()["eval"]["total"] == 5
    assert (await ready.get("/evals"))["total_count"] == 3
    stopped = await ready.post("/evals/five/stop", {})
    assert stopped.status_code == 200


async def test_the_key_of_a_deleted_evaluation_makes_no_other_one(ready: Application) -> None:
    body = {"config": {"experiment": config()["experiment"]}, "name": "gone"}
    made = (await ready.post("/evals", body, Idempotency_Key="k")).json()["eval"]
    await ready.append([EvaluationCompleted(evaluation=made["id"], status="failed")])
    assert (await ready.api.delete("/api/v1/evals/gone")).status_code == 200
    again = await ready.post("/evals", body, Idempotency_Key="k")
    assert again.status_code == 409, again.text
    assert "was deleted; send a new key" in again.json()["detail"]
    assert await ready.services.readmodel.names.find_holders("evaluation", "gone") == []
    assert (await ready.post("/evals", body)).status_code == 201
