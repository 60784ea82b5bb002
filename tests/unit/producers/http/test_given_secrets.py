"""Secrets that a submission gives for its run alone: who sees them, and when they go."""

from typing import Any

import pytest

from infra import failpoints
from schemas.errors import Conflict
from schemas.events import (
    EvaluationCompleted,
    EvaluationStarted,
    RunFailed,
    RunFinished,
    RunStopped,
)
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import Application, rows
from tests.kit.specs import template

pytestmark = pytest.mark.postgres

VALUE, OTHER = "hush-hush-1", "another-hush-2"
EXPERIMENT = {
    "rollout": "say",
    "entrypoint": "main.py",
    "model_path": "scratch:qwen3-tiny",
    "dataset": "numbers",
}
RUN: dict[str, Any] = {
    "experiment": EXPERIMENT,
    "training": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
    "secrets": {"required": ["KEY"]},
}
EVALUATION: dict[str, Any] = {"experiment": EXPERIMENT, "secrets": {"required": ["KEY"]}}


@pytest.fixture
async def ready(app: Application) -> Application:
    """An application that has a dataset and a workspace."""
    assert (await app.upload("numbers", rows(8))).status_code == 200
    made = await app.post("/workspaces", {"url": "/repo", "name": "w"})
    assert made.status_code == 201, made.text
    return app


async def submit(
    app: Application, path: str = "/runs", config: object = RUN, **secrets: str
) -> str:
    """The id of a run or evaluation that was submitted with these secrets."""
    answer = await app.post(path, {"config": config, "secrets": secrets})
    assert answer.status_code == 201, answer.text
    assert VALUE not in answer.text
    body = answer.json()
    return str((body.get("run") or body["eval"])["id"])


async def given(app: Application) -> list[tuple[str, str]]:
    """The owner and name of each secret that was given and not taken back."""
    found = await app.database.durable.fetch("select owner, name from run_secrets order by 1, 2")
    return [(row["owner"], row["name"]) for row in found]


async def value_for(app: Application, run: str) -> str | None:
    """The value of KEY that user code of a run gets."""
    found = await app.services.secret_store.resolve(
        ["KEY"], workspace=None, submitter=None, run=run
    )
    return found["KEY"].reveal() if found else None


async def test_a_run_is_submitted_with_a_secret_that_nobody_stored(ready: Application) -> None:
    run = await submit(ready, KEY=VALUE)
    assert await given(ready) == [(run, "KEY")]
    assert await value_for(ready, run) == VALUE
    listed = await ready.api.get("/api/v1/secrets")
    assert listed.json()["secrets"] == []
    for table in ("events", "runs", "run_secrets", "names", "audit", "log_lines"):
        row = await ready.database.durable.fetchval(
            f"select string_agg(t::text, '') from {table} t"
        )
        assert VALUE not in (row or ""), table


async def test_two_runs_do_not_share_what_they_are_given(ready: Application) -> None:
    one, other = await submit(ready, KEY=VALUE), await submit(ready, KEY=OTHER)
    assert await value_for(ready, one) == VALUE
    assert await value_for(ready, other) == OTHER


@pytest.mark.parametrize("kind", ["finished", "failed", "stopped"])
async def test_a_secret_of_one_run_goes_when_it_ends(ready: Application, kind: str) -> None:
    ended, other = await submit(ready, KEY=VALUE), await submit(ready, KEY=OTHER)
    end = {
        "finished": RunFinished(run=ended, step=1),
        "failed": RunFailed(run=ended, kind="crash", message="m"),
        "stopped": RunStopped(run=ended, step=1),
    }[kind]
    await ready.append([end])
    assert await given(ready) == [(other, "KEY")]


async def test_twin_a_secret_stays_where_the_projector_does_not_drop_it(
    ready: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.readmodel.store.DropGivenSecrets", type("Nothing", (), {}))
    ended = await submit(ready, KEY=VALUE)
    await ready.append([RunFinished(run=ended, step=1)])
    assert await given(ready) == [(ended, "KEY")]


async def test_a_refused_submission_leaves_no_secret(ready: Application) -> None:
    for config, secrets, status in (
        (RUN, {"KEY": "short"}, 400),
        (RUN, {"KEY": VALUE, "MORE": VALUE}, 400),
        (RUN, {"KEY": VALUE, "lower": VALUE}, 400),
        ({**RUN, "training": {"lr": 7}}, {"KEY": VALUE}, 400),
    ):
        answer = await ready.post("/runs", {"config": config, "secrets": secrets})
        assert answer.status_code == status, answer.text
        assert VALUE not in answer.text
    wrong: tuple[object, ...] = ("x", ["x"], {"KEY": 7}, {"KEY": None})
    for one in wrong:
        answer = await ready.post("/runs", {"config": RUN, "secrets": one})
        assert answer.status_code == 400, answer.text
    assert await given(ready) == []


async def test_a_request_that_the_log_refuses_takes_its_secrets_back(
    ready: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were stored before, as the failpoint that was passed shows."""
    key = {"Idempotency_Key": "one"}
    asked = {"config": RUN, "secrets": {"KEY": VALUE}}
    first = await ready.post("/runs", asked, **key)
    assert first.status_code == 201
    kept = await given(ready)
    assert len(kept) == 1
    again = await ready.post("/runs", {**asked, "name": "other"}, **key)
    assert again.status_code == 409
    assert await given(ready) == kept

    seen = []
    real = failpoints.hit

    def look(name: str) -> None:
        seen.append(name)
        real(name)

    async def refuse(*_: object, **__: object) -> None:
        raise Conflict("refused for the test")

    monkeypatch.setattr("producers.core.submit.hit", look)
    monkeypatch.setattr(ready.services.log, "append", refuse)
    refused = await ready.post("/runs", {"config": RUN, "secrets": {"KEY": VALUE}})
    assert refused.status_code == 409
    assert "submit.secrets_given" in seen
    assert await given(ready) == kept


async def test_an_evaluation_that_is_repeated_is_given_its_secrets_again(
    ready: Application,
) -> None:
    evaluation = await submit(ready, "/evals", EVALUATION, KEY=VALUE)
    assert await value_for(ready, evaluation) == VALUE
    control = ready.services.control
    ended = EvaluationCompleted(
        evaluation=evaluation, status="finished", reward=None, metrics={}, message=None
    )
    started = EvaluationStarted(
        evaluation=evaluation, template=template(), rows=(0,), batch_size=1, pass_threshold=1.0
    )
    await ready.append([started, ended])
    assert await given(ready) == []
    unset = await ready.api.post(f"/api/v1/evals/{evaluation}/retry", json={})
    assert unset.status_code == 400, unset.text
    assert unset.json()["issues"][0]["key"] == "secrets.required"
    again, cursor = await control.retry_evaluation(evaluation, given={"KEY": SecretValue(OTHER)})
    assert again == evaluation
    assert await value_for(ready, evaluation) == OTHER
    assert await ready.services.readmodel.caught_up(cursor, timeout_s=60)
    await ready.services.readmodel.reset()
    assert await ready.services.readmodel.caught_up(cursor, timeout_s=60)
    assert await value_for(ready, evaluation) == OTHER, "an old end took back what was given later"


async def test_a_dry_run_stores_no_secret(ready: Application) -> None:
    asked = {"config": RUN, "secrets": {"KEY": VALUE}, "dry_run": True}
    answer = await ready.post("/runs", asked)
    assert answer.status_code == 200, answer.text
    assert VALUE not in answer.text
    assert await given(ready) == []
