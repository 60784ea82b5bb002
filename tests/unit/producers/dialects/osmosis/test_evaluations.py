"""Evaluations on the wire of the osmosis client."""

import json
from typing import Any

import pytest

from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import PostgresSecrets
from infra.ports.secrets import SecretOwner
from schemas.config import EvalConfig, Secrets
from schemas.events import (
    EvaluationCompleted,
    EvaluationRequested,
    EvaluationRetryRequested,
    EvaluationStarted,
    GroupGraded,
)
from schemas.ids import eval_stream
from schemas.secrets.secret_value import SecretValue
from schemas.specs import SampleEntry
from tests.kit.application import Application
from tests.kit.tenants import Tenant, ask
from tests.unit.producers.http.routes.test_evaluations import CONFIG, dataset, grade
from tests.unit.producers.http.test_given_secrets import given as given_names

pytestmark = pytest.mark.postgres

SUBMITTED: dict[str, Any] = {
    "experiment_config": {
        "rollout": "say",
        "entrypoint": "main.py",
        "model_path": "scratch:qwen3-tiny",
        "dataset": "numbers",
    },
    "evaluation_config": {"n": 2, "limit": 1},
    "secrets": {"required": []},
}


async def wire(
    app: Application,
    tenant: Tenant,
    path: str,
    body: object = None,
    *,
    status: int = 200,
) -> Any:
    """The body of a response below /api/cli/eval-runs. With a `body`, the request is a POST."""
    headers = {"X-Osmosis-Workspace": tenant.name}
    method = "GET" if body is None else "POST"
    content = {} if body is None else {"json": body}
    answer = await ask(
        app, method, f"/api/cli/eval-runs{path}", tenant.api_key, headers=headers, **content
    )
    assert answer.status_code == status, answer.text
    return answer.json()


async def evaluate(
    app: Application, tenant: Tenant, *rows: tuple[float | None, ...], config: EvalConfig = CONFIG
) -> EvaluationRequested:
    """An evaluation of the workspace, of two rows with two attempts at each, that ended after these."""
    data = await dataset(app)
    graded: list[GroupGraded] = [
        await grade(app, "one", row, slot=slot, data=data) for slot, row in enumerate(rows)
    ]
    entry = SampleEntry(index=0, prompt_tokens=30, completion_tokens=5)
    graded = [one.model_copy(update={"entries": (entry, *one.entries[1:])}) for one in graded]
    asked = EvaluationRequested(
        evaluation="one",
        eval_name="nice-name",
        template=graded[0].spec.template,
        rows=(1, 3),
        config=config,
        workspace=tenant.workspace,
    )
    begun = EvaluationStarted(
        evaluation="one",
        template=asked.template,
        rows=(1, 3),
        batch_size=2,
        pass_threshold=1.0,
    )
    metrics = {"eval/pass@1": 0.5, "eval/pass@2": 0.75, "eval/pass_rate": 0.5}
    ended = EvaluationCompleted(evaluation="one", status="finished", reward=0.5, metrics=metrics)
    await app.append([asked, begun, *graded, ended])
    return asked


async def test_an_evaluation_has_its_results(app: Application, ours: Tenant) -> None:
    await evaluate(app, ours, (1.0, 0.0), (0.5, None))
    found = await wire(app, ours, "/nice-name")
    assert found["eval_run"]["id"] == "one"
    assert found["config"]["model_path"] == "scratch:qwen3-tiny"
    assert found["config"]["n"] == 2
    results = found["results"]
    assert (results["graded"], results["passed"], results["failed"]) == (3, 1, 1)
    assert (results["total_runs"], results["skipped"], results["sampled_rows"]) == (4, 0, 2)
    assert (results["total_tokens"], results["total_dataset_rows"]) == (70, 4)
    assert results["reward_stats"]["pass_at_k"] == {"1": 0.5, "2": 0.75}
    assert await wire(app, ours, "/one") == found, "its id is a key, too"


async def test_metrics_have_pass_at_k_in_order(app: Application, ours: Tenant) -> None:
    await evaluate(app, ours, (1.0, 0.0), (0.5, None))
    found = await wire(app, ours, "/one/metrics")
    assert found["status"] == "finished"
    assert found["pass_at_k"] == [{"k": 1, "value": 0.5}, {"k": 2, "value": 0.75}]
    overview = found["overview"]
    assert (overview["total_samples"], overview["completed_samples"]) == (4, 4)
    assert overview["tokens_used"] == 70
    assert isinstance(overview["duration_ms"], int)
    assert found["reward_stats"] == {"mean": 0.5, "std": pytest.approx(0.4082, abs=1e-3)} | {
        "min": 0.0,
        "median": 0.5,
        "max": 1.0,
    }


async def test_evaluations_of_a_workspace_are_listed(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    await evaluate(app, ours, (1.0, 1.0))
    listed = await wire(app, ours, "?limit=50&offset=0")
    names = [one["name"] for one in listed["eval_runs"]]
    assert names[0] == "nice-name"
    assert "theirs-eval" not in names
    assert listed["eval_runs"][0]["results"] == {
        "score": 0.5,
        "pass_rate": 0.5,
        "sampled_rows": 2,
    }
    await wire(app, theirs, "/nice-name", status=404)
    await wire(app, theirs, "/one", status=404)
    too_many = await wire(app, ours, "?limit=51", status=400)
    assert too_many["field"] == "limit"


async def test_a_retry_repeats_what_was_not_made(app: Application, ours: Tenant) -> None:
    await evaluate(app, ours, (1.0, 1.0))
    found = await wire(app, ours, "/nice-name/retry", {})
    assert found["retryable_samples"] == 2
    assert found["workflow_id"] == found["id"] == "one"
    loaded = await app.services.log.load({eval_stream("one"): 0})
    events = [recorded.event for recorded in loaded[eval_stream("one")]]
    assert any(isinstance(event, EvaluationRetryRequested) for event in events)


async def test_a_retry_takes_the_secrets_of_its_body(app: Application, ours: Tenant) -> None:
    """Without them it names those that are missing, so that the client asks for their values."""
    config = CONFIG.model_copy(update={"secrets": Secrets(required=("JUDGE_KEY",))})
    await evaluate(app, ours, (1.0, 1.0), config=config)
    refused = await wire(app, ours, "/one/retry", {}, status=400)
    assert refused["run_secret_names"] == ["JUDGE_KEY"]
    other = await wire(app, ours, "/one/retry", {"secrets": {"OTHER": "x" * 12}}, status=400)
    assert "run_secret_names" not in other, "a wrong name is not asked for again"
    assert "x" * 12 not in str(other)
    body = {"secrets": {"JUDGE_KEY": "only-for-this-retry"}}
    assert (await wire(app, ours, "/one/retry", body))["retryable_samples"] == 2
    assert await given_names(app) == [("one", "JUDGE_KEY")]


async def test_an_evaluation_without_gaps_has_nothing_to_repeat(
    app: Application, ours: Tenant
) -> None:
    await evaluate(app, ours, (1.0, 1.0), (0.0, 0.5))
    refused = await wire(app, ours, "/one/retry", {}, status=409)
    assert "nothing to repeat" in refused["error"]
    stopped = await wire(app, ours, "/one/stop", {}, status=409)
    assert "already finished" in stopped["error"]


async def test_an_evaluation_of_a_toml_is_submitted_and_stopped(
    app: Application, ours: Tenant
) -> None:
    await dataset(app)
    made = await wire(app, ours, "", SUBMITTED, status=201)
    assert made["status"] == "pending"
    assert made["platform_url"].endswith(f"/evals/{made['id']}")
    shown = await wire(app, ours, f"/{made['name']}")
    assert shown["config"]["limit"] == 1
    assert shown["rollout"] == {"id": "say", "name": "say"}
    logs = await wire(app, ours, f"/{made['name']}/logs?limit=1")
    assert made["name"] in logs["logs"][0]["message"]
    stopped = await wire(app, ours, f"/{made['name']}/stop", {})
    assert stopped["id"] == made["id"]


async def test_a_submission_takes_the_secrets_of_its_body(app: Application, ours: Tenant) -> None:
    await dataset(app)
    body: dict[str, Any] = {**SUBMITTED, "secrets": {"required": ["JUDGE_KEY"]}}
    missing = await wire(app, ours, "", body, status=404)
    assert missing["error"] == "Secret(s) not found: JUDGE_KEY"
    body["secrets"]["provided"] = {"JUDGE_KEY": "only-for-this-evaluation"}
    made = await wire(app, ours, "", body, status=201)
    assert await given_names(app) == [(made["id"], "JUDGE_KEY")]


async def test_a_model_is_of_a_provider_if_its_secret_is_required(
    app: Application, ours: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the client's own TOML names it. Without the secret, the text names a model of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    await dataset(app)
    experiment = {**SUBMITTED["experiment_config"], "model_path": "openai/gpt-5-mini"}
    body = {**SUBMITTED, "experiment_config": experiment}
    refused = await wire(app, ours, "", body, status=400)
    assert [issue["key"] for issue in refused["issues"]] == ["experiment.model_path"]
    body["secrets"] = {"required": ["OPENAI_API_KEY"]}
    missing = await wire(app, ours, "", body, status=404)
    assert missing["error"] == "Secret(s) not found: OPENAI_API_KEY"
    body["secrets"]["provided"] = {"OPENAI_API_KEY": "only-for-user-code"}
    unset = await wire(app, ours, "", body, status=400)
    assert [issue["key"] for issue in unset["issues"]] == ["advanced.api_key_secret"]
    del body["secrets"]["provided"]
    secrets = PostgresSecrets(app.database, Sealer.of(app.services.settings))
    owner = SecretOwner("workspace", ours.workspace)
    await secrets.put_secret(owner, "OPENAI_API_KEY", SecretValue("sk-" + "x" * 20), by="test")
    made = await wire(app, ours, "", body, status=201)
    shown = await wire(app, ours, f"/{made['name']}")
    assert shown["config"]["model_path"] == "provider:openai/gpt-5-mini"


async def test_a_wrong_key_is_an_issue_of_the_config(app: Application, ours: Tenant) -> None:
    wrong = json.loads(json.dumps(SUBMITTED))
    wrong["evaluation_config"] = {"limits": 3, "n": 0}
    refused = await wire(app, ours, "", wrong, status=400)
    assert refused["error"] == "Invalid evaluation config"
    issues = {issue["key"]: issue for issue in refused["issues"]}
    assert issues["evaluation.limits"]["key_correction"] == "evaluation.limit"
    assert "evaluation.n" in issues
