"""What a request names beside its path: things of another organisation in queries, bodies and headers
answer like things that do not exist, byte for byte."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.application import Application, application
from tests.kit.tenants import Tenant, ask, tenant

pytestmark = pytest.mark.postgres

WITHIN = {"X-Osmosis-Workspace": "alphaworks"}


@pytest.fixture
async def shared(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    urls = ("https://h.example/alpha/alphaworks", "https://h.example/beta/betaworks")
    async with application(database_url, tmp_path / "home", repositories=urls) as app:
        for name in ("left", "right"):
            made = await app.post("/organisations", {"name": name})
            assert made.status_code == 201, made.text
        yield app


@pytest.fixture
async def alpha(shared: Application) -> Tenant:
    return await tenant(
        shared, "alphaworks", "https://h.example/alpha/alphaworks", organisation="left"
    )


@pytest.fixture
async def beta(shared: Application) -> Tenant:
    return await tenant(
        shared, "betaworks", "https://h.example/beta/betaworks", organisation="right"
    )


def names_of(of: Tenant, kind: str) -> list[str]:
    """Words by which a request may name things of a tenant."""
    if kind == "run":
        return [of.run, of.run_name, of.verification, of.regrade]
    if kind == "evaluation":
        return [of.evaluation, f"{of.name}-eval", of.dataset, f"{of.name}-data"]
    return [of.workspace, of.name, f"beta/{of.name}"]


EXPERIMENT = {
    "rollout": "r",
    "entrypoint": "main.py",
    "model_path": "scratch:qwen3-tiny",
    "dataset": "alphaworks-data",
}


def evaluation(**values: Any) -> Mapping[str, Any]:
    config = {"experiment": EXPERIMENT | values, "evaluation": {"limit": 1, "n": 1}}
    return {"config": config, "workspace": "alphaworks"}


def submission(**values: Any) -> Mapping[str, Any]:
    """A body of the osmosis client."""
    config = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "lr": 1e-3}
    return {"experiment_config": EXPERIMENT | values, "training_config": config}


def training(**values: Any) -> Mapping[str, Any]:
    advanced = values.pop("advanced", {})
    return {
        "config": {
            "experiment": EXPERIMENT | values,
            "training": {
                "lr": 1e-3,
                "total_epochs": 1,
                "n_samples_per_prompt": 2,
                "rollout_batch_size": 1,
                "max_prompt_length": 64,
                "max_response_length": 8,
            },
            "advanced": advanced,
        },
        "workspace": "alphaworks",
    }


FORKED = {"advanced.max_steps": 9, "advanced.validation_dataset": "%s"}
"""The changes of a fork that names a dataset."""

REQUESTS: list[tuple[str, str, Any]] = [
    *(
        ("GET", f"/api/v1/{path}", None)
        for path in (
            "runs?search=%s",
            "runs?tag=%s",
            "secrets?workspace=%s",
            "audit?api_key=%s",
            "organisations/%s",
            "runs/%s",
            "evals/%s",
            "datasets/%s",
            "workspaces/%s",
            "deployments/%s",
            "checkpoints/%s@3",
            "checkpoints/alphaworks-run@3/compare/%s@3",
            "checkpoints/%s@3/compare/alphaworks-run@3",
            "evals/alphaworks-eval/compare/%s",
            "evals/%s/compare/alphaworks-eval",
            "runs/alphaworks-run/samples/%s-train-1-0-0.0",
            "runs/alphaworks-run/trace?sample=%s-train-1-0-0.0",
            "verifications/%s",
            "regrades/%s",
            "regrades/regrade:%s",
            "runs/%s/regrades",
            "runs/%s/forks",
            "runs/%s/diff/alphaworks-run",
            "runs/alphaworks-run/diff/%s",
            "cost?run=%s",
            "cost?by=sample&run=%s",
        )
    ),
    *(
        ("GET", path, None)
        for path in (
            "/compare?runs=alphaworks-run,%s",
            "/compare.json?runs=alphaworks-run,%s",
            "/compare/checkpoints?a=alphaworks-run@3&b=%s@3",
            "/compare/checkpoints.csv?a=alphaworks-run@3&b=%s@3",
            "/compare/evaluations?a=alphaworks-eval&b=%s",
            "/new?from=%s@3",
            "/new-evaluation?checkpoint=%s@3",
            "/deployments?checkpoint=%s@3",
            "/members?organisation=%s",
            "/playground?model=%s",
            "/cost?run=%s",
            "/runs/%s/forks",
            "/runs/%s/regrades",
            "/runs/alphaworks-run/regrades/%s",
            "/runs/alphaworks-run/samples?regrade=%s",
            "/?search=%s",
            "/?workspace=%s",
            "/runs.json?search=%s",
            "/runs.csv?search=%s",
            "/evals.json?search=%s",
            "/datasets.json?search=%s",
            "/v1/models/%s",
            "/api/cli/training-runs/%s",
            "/api/cli/training-runs/%s/metrics",
            "/api/cli/training-runs/%s/logs",
            "/api/cli/training-runs/%s/checkpoints",
            "/api/cli/training-runs?status=%s",
            "/api/cli/eval-runs/%s",
            "/api/cli/eval-runs/%s/samples/manifest",
            "/api/cli/datasets/%s",
            "/api/cli/datasets/%s/download",
            "/api/cli/datasets/%s/logs",
            "/api/cli/models/%s",
            "/api/cli/models/%s-step-3",
            "/api/cli/models/base/%s",
            "/api/cli/rollouts?branch=%s",
            "/api/cli/quickstart?organizationId=%s",
        )
    ),
    ("POST", "/api/v1/runs", training(dataset="%s")),
    ("POST", "/api/v1/runs", training(dataset="%s@1")),
    ("POST", "/api/v1/runs", training(model_path="%s@last")),
    ("POST", "/api/v1/runs", training(model_path="%s@3")),
    ("POST", "/api/v1/runs", training(advanced={"validation_dataset": "%s"})),
    ("POST", "/api/v1/runs", training(advanced={"algorithm": "distill", "teacher": "%s@last"})),
    ("POST", "/api/v1/runs", training(advanced={"reward_models": [{"model": "%s@last"}]})),
    ("POST", "/api/v1/runs", {**training(), "workspace": "%s"}),
    ("POST", "/api/v1/runs/%s/fork", {"at": "2", "name": "taken"}),
    ("POST", "/api/v1/runs/alphaworks-run/fork", {"at": "2", "name": "x", "set": FORKED}),
    ("POST", "/api/v1/runs/%s/regrades", {"weights": {"grader": 0.5}}),
    ("POST", "/api/v1/runs/regrade:%s/regrades", {"weights": {"grader": 0.5}}),
    ("POST", "/api/v1/runs/%s/resume", {"raise": {"max_tokens": 9}}),
    ("POST", "/api/v1/datasets/from-run", {"run": "%s", "name": "rows", "as": "sft"}),
    ("POST", "/api/v1/datasets/from-run", {"run": "%s", "name": "%s-data", "as": "sft"}),
    ("POST", "/api/v1/evals", evaluation(dataset="%s")),
    ("POST", "/api/v1/evals", evaluation(model_path="%s@last")),
    ("POST", "/api/v1/evals", {**evaluation(), "workspace": "%s"}),
    ("POST", "/api/cli/training-runs", submission(dataset="%s")),
    ("POST", "/api/cli/training-runs", submission(model_path="%s-step-3")),
    ("POST", "/api/cli/eval-runs", submission(dataset="%s")),
    ("POST", "/api/v1/deployments", {"checkpoint": "%s@3"}),
    ("POST", "/api/v1/deployments", {"checkpoint": "%s@last", "name": "x"}),
    ("POST", "/api/v1/api-keys", {"name": "x", "scopes": ["read"], "workspace": "%s"}),
    ("POST", "/api/v1/api-keys", {"name": "x", "scopes": ["read"], "organisation": "%s"}),
    (
        "POST",
        "/v1/chat/completions",
        {"model": "%s", "messages": [{"role": "user", "content": "a"}]},
    ),
    ("POST", "/v1/completions", {"model": "%s", "prompt": "a"}),
    ("PUT", "/api/v1/secrets/A_KEY", {"value": "k-12345678", "workspace": "%s"}),
    ("DELETE", "/api/v1/secrets/A_KEY?workspace=%s", None),
    ("DELETE", "/api/v1/api-keys/%s-admin", None),
    ("POST", "/api/v1/api-keys/%s-admin/rotate", {}),
    ("POST", "/api/v1/runs/%s/rename", {"name": "taken"}),
    ("POST", "/api/cli/models/%s-step-3/deploy", {}),
    ("POST", "/api/cli/datasets/%s/complete", {}),
    ("POST", "/api/cli/datasets/%s/abort", {}),
    ("POST", "/api/cli/eval-runs/%s/stop", {}),
    ("POST", "/api/cli/eval-runs/%s/retry", {}),
    ("POST", "/api/cli/training-runs/%s/stop", {}),
    ("POST", "/api/cli/eval-runs/%s/samples/download-urls", {"paths": ["x"]}),
]


def put(name: str, value: Any) -> Any:
    """A request with a name in the place of `%s`."""
    if isinstance(value, str):
        return value.replace("%s", name)
    if isinstance(value, Mapping):
        return {key: put(name, one) for key, one in value.items()}
    if isinstance(value, list):
        return [put(name, one) for one in value]
    return value


def absent_like(name: str) -> str:
    """A word of the same form that names nothing, as similar to others as the name is."""
    first = name[0]
    return (
        f"{'q' if not first.isdigit() and first > 'f' else 'c' if first == 'd' else 'd'}{name[1:]}"
    )


async def answer_to(app: Application, who: Tenant, name: str, request: Any) -> tuple[int, str]:
    method, path, body = request
    headers = dict(WITHIN) if path.startswith("/api/cli") else {}
    content = {} if body is None else {"json": put(name, body)}
    found = await ask(app, method, put(name, path), who.api_key, headers=headers, **content)
    return found.status_code, found.text.replace(name, "NAME")


@pytest.mark.parametrize("kind", ["run", "evaluation", "workspace"])
async def test_names_of_another_organisation_answer_like_absent_ones(
    shared: Application, alpha: Tenant, beta: Tenant, kind: str
) -> None:
    differ = []
    for request in REQUESTS:
        for name in names_of(beta, kind):
            if "/" in name and "?" not in request[1] and "%s" in request[1]:
                continue  # another path
            theirs = await answer_to(shared, alpha, name, request)
            absent = await answer_to(shared, alpha, absent_like(name), request)
            if theirs != absent:
                differ.append((*request[:2], name, theirs, absent))
    assert not differ


@pytest.mark.parametrize("header", ["X-Osmosis-Workspace", "X-Osmosis-Git"])
async def test_a_workspace_of_another_organisation_is_absent_in_headers(
    shared: Application, alpha: Tenant, beta: Tenant, header: str
) -> None:
    for name in (beta.name, beta.workspace, "betaworks/betaworks", "beta/betaworks"):
        for path in ("/api/cli/verify", "/api/cli/training-runs", "/api/cli/datasets"):
            seen = []
            for each in (name, absent_like(name)):
                found = await ask(shared, "GET", path, alpha.api_key, headers={header: each})
                seen.append((found.status_code, found.text.replace(each, "NAME")))
            assert seen[0] == seen[1], (path, seen)
            assert seen[0][0] in (400, 404)
