"""Quotas of workspaces and API keys, where two control processes serve one database."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.identity.quotas import BLOCK_BYTES
from infra.ports.actor import Actor, acting_as
from schemas.errors import QuotaExceeded
from schemas.events import EvaluationCompleted, RunFailed
from tests.kit.application import Application, application, rows
from tests.kit.tenants import ask, create_api_key
from tests.unit.producers.http.test_submit import config

pytestmark = pytest.mark.postgres


@pytest.fixture
async def other(app: Application, database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    """Another control process of the same installation."""
    async with application(database_url, tmp_path / "other") as served:
        yield served


@pytest.fixture
async def ready(app: Application) -> Application:
    assert (await app.upload("numbers", rows(8))).status_code == 200
    assert (await app.post("/workspaces", {"url": "/repo", "name": "w"})).status_code == 201
    return app


def limit_keys(*apps: Application, **limits: int) -> None:
    """As HEADRACE_KEY_QUOTAS does."""
    for app in apps:
        object.__setattr__(app.services.settings, "key_quotas", limits)
        app.services.__dict__.pop("quotas", None)
        app.services.__dict__.pop("submitter", None)


async def set_limits(app: Application, **limits: object) -> Any:
    answer = await app.post("/workspaces/w/quotas", {"limits": limits})
    assert answer.status_code == 200, answer.text
    return answer.json()["quotas"]


async def shown(app: Application, api_key: str | None = None) -> Mapping[str, Any]:
    path = "/api/v1/workspaces/w/quotas"
    answer = await (ask(app, "GET", path, api_key) if api_key else app.api.get(path))
    return {f"{one['holder']} {one['name']}": one for one in answer.json()["quotas"]}


async def submit(app: Application, api_key: str | None = None, **headers: str) -> httpx.Response:
    body = {"config": config()}
    if api_key is None:
        return await app.post("/runs", body, **headers)
    return await ask(app, "POST", "/api/v1/runs", api_key, json=body)


def refusal(answer: httpx.Response, name: str) -> str:
    """The sentence of a refusal, which names the quota."""
    assert answer.status_code == 429, answer.text
    document = answer.json()
    assert document["code"] == "QUOTA_EXCEEDED"
    assert f"quota {name}: this " in document["detail"]
    assert int(answer.headers["retry-after"]) >= 1
    return str(document["detail"])


async def test_of_simultaneous_submits_at_a_limit_of_one_exactly_one_gets_in(
    ready: Application, other: Application
) -> None:
    await set_limits(ready, runs_at_once=1)
    answers = await asyncio.gather(*(submit(app) for app in (ready, other) * 5))
    assert sorted(one.status_code for one in answers) == [201] + [429] * 9
    for answer in answers:
        if answer.status_code == 429:
            text = refusal(answer, "runs_at_once")
            assert "this workspace may have 1 runs and evaluations at once" in text
            assert "it frees when one of them ends" in text
            assert "`headrace workspace quotas w`" in text
    [run] = [one.json()["run"]["id"] for one in answers if one.status_code == 201]
    await ready.append([RunFailed(run=run, kind="crash", message="over")])
    assert (await submit(other)).status_code == 201


@pytest.mark.parametrize("name", ["runs_at_once", "runs_per_day"])
async def test_a_quota_of_zero_says_who_set_it_and_not_that_it_frees(
    ready: Application, name: str
) -> None:
    await set_limits(ready, **{name: 0})
    text = refusal(await submit(ready), name)
    assert "an administrator set it to 0, and `headrace workspace quotas w`" in text
    assert "frees" not in text


async def num_admitted(
    admit: Callable[[Application, int], Awaitable[bool]], *processes: Application
) -> int:
    """How many of twenty admissions at one moment are granted, with their numbers from 0."""
    for app in processes:  # so that every connection is open
        await asyncio.gather(*(app.database.durable.fetchval("select 1") for _ in range(12)))
    apps = [processes[number % len(processes)] for number in range(20)]
    return sum(await asyncio.gather(*(admit(app, number) for number, app in enumerate(apps))))


async def test_admissions_of_two_processes_at_one_moment_are_counted_one_by_one(
    ready: Application, other: Application
) -> None:
    await set_limits(ready, runs_per_day=3)
    workspace = (await ready.get("/workspaces/w"))["workspace"]["id"]

    async def admit(app: Application, number: int) -> bool:
        try:
            await app.services.quotas.admit_run(f"r{number}", "s", workspace=workspace)
        except QuotaExceeded:
            return False
        return True

    assert await num_admitted(admit, ready, other) == 3


async def test_admissions_of_one_key_in_two_workspaces_are_counted_one_by_one(
    ready: Application, other: Application
) -> None:
    limit_keys(ready, other, runs_per_day=3)
    await create_api_key(ready, "ci", "submit")
    api_key = await ready.database.durable.fetchval("select id from api_keys where name = 'ci'")
    actor = Actor(api_key, "ada", frozenset({"submit"}))

    async def admit(app: Application, number: int) -> bool:
        try:
            with acting_as(actor):
                await app.services.quotas.admit_run(f"r{number}", "s", workspace=f"w{number}")
        except QuotaExceeded:
            return False
        return True

    assert await num_admitted(admit, ready, other) == 3


async def test_evaluations_count_as_runs(ready: Application) -> None:
    await set_limits(ready, runs_per_day=1)
    body = {"config": {"experiment": config()["experiment"]}}
    assert (await ready.post("/evals", body)).status_code == 201
    assert "UTC" in refusal(await submit(ready), "runs_per_day")
    refusal(await ready.post("/evals", body), "runs_per_day")


async def test_a_deleted_evaluation_counts_for_the_day_and_no_longer_as_running(
    ready: Application,
) -> None:
    await set_limits(ready, runs_per_day=2, runs_at_once=1)
    body = {"config": {"experiment": config()["experiment"]}}
    made = (await ready.post("/evals", body)).json()["eval"]
    await ready.append([EvaluationCompleted(evaluation=made["id"], status="failed")])
    assert (await ready.api.delete(f"/api/v1/evals/{made['id']}")).status_code == 200
    assert (await ready.post("/evals", body)).status_code == 201
    await ready.database.durable.execute(
        "update admitted_runs set admitted_at = greatest("
        "date_trunc('day', clock_timestamp(), 'UTC'), admitted_at - interval '11 minutes')"
    )
    refusal(await ready.post("/evals", body), "runs_at_once")
    assert (await shown(ready))["workspace runs_per_day"]["used"] == 2


async def test_a_repeated_or_refused_submit_counts_once_or_never(ready: Application) -> None:
    await set_limits(ready, runs_per_day=2)
    for _ in range(3):
        assert (await submit(ready, Idempotency_Key="k")).status_code == 201
    assert (await ready.post("/runs", {"config": {}})).status_code == 400
    assert (await shown(ready))["workspace runs_per_day"]["used"] == 1
    assert (await submit(ready)).status_code == 201
    refusal(await submit(ready), "runs_per_day")
    assert (await submit(ready, Idempotency_Key="k")).status_code == 201
    await ready.database.durable.execute(
        "update admitted_runs set admitted_at = admitted_at - interval '1 day'"
    )
    assert (await submit(ready)).status_code == 201, "the next day"


async def test_a_key_has_quotas_of_its_own_and_the_root_api_key_has_none(
    ready: Application, other: Application
) -> None:
    limit_keys(ready, other, runs_per_day=1)
    first, second = [await create_api_key(ready, name, "submit") for name in ("a", "b")]
    answers = await asyncio.gather(*(submit(app, first) for app in (ready, other) * 2))
    assert sorted(one.status_code for one in answers) == [201, 429, 429, 429]
    assert "this API key" in next(one.text for one in answers if one.status_code == 429)
    assert (await submit(other, second)).status_code == 201
    assert [(await submit(ready)).status_code for _ in range(2)] == [201, 201]


async def test_requests_beyond_the_limit_of_a_minute_are_refused_by_every_process(
    ready: Application, other: Application
) -> None:
    limit_keys(ready, other, requests_per_minute=6)
    api_key = await create_api_key(ready, "ci", "read", "inference")
    paths = ("/api/v1/runs", "/v1/models")
    answers = [
        await ask(app, "GET", path, api_key)
        for _ in range(5)
        for app in (ready, other)
        for path in paths
    ]
    statuses = [one.status_code for one in answers]
    assert 6 <= statuses.count(200) <= 12, "a minute may begin in between"
    refused = [one for one in answers if one.status_code == 429]
    assert refused
    assert "requests_per_minute" in refused[0].text
    assert 1 <= int(refused[0].headers["retry-after"]) <= 60
    assert (await ready.api.get("/api/v1/runs")).status_code == 200, "the root API key has no limit"


async def test_a_workspace_shares_its_requests_among_its_keys(ready: Application) -> None:
    await set_limits(ready, requests_per_minute=4)
    keys = [await create_api_key(ready, name, "read", workspace="w") for name in ("a", "b")]
    answers = [await ask(ready, "GET", "/api/v1/runs", key) for _ in range(6) for key in keys]
    assert 4 <= [one.status_code for one in answers].count(200) <= 8
    assert (await set_limits(ready, requests_per_minute="unlimited"))[2]["most"] is None
    assert (await ask(ready, "GET", "/api/v1/runs", keys[0])).status_code == 200


async def test_uploads_beyond_the_bytes_of_a_day_are_refused_before_they_are_read(
    ready: Application, other: Application
) -> None:
    limit_keys(ready, other, upload_bytes_per_day=1000)
    api_key = await create_api_key(ready, "ci", "submit")
    path = "/api/v1/datasets/validate?file_name=a.jsonl"

    async def check(app: Application, content: Any) -> httpx.Response:
        return await ask(app, "POST", path, api_key, content=content)

    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    content = rows(8).encode()
    assert 300 < len(content) < 600
    assert (await check(ready, content)).status_code == 200
    declared = {"Authorization": f"Bearer {api_key}", "Content-Length": str(len(content) * 2)}
    refused = await other.api.post(path, content=never(), headers=declared)
    assert "1000 bytes of uploads a day" in refusal(refused, "upload_bytes_per_day")
    assert (await check(other, content)).status_code == 200
    assert (await shown(other, api_key))["API key upload_bytes_per_day"]["used"] == len(content) * 2

    async def parts() -> AsyncIterator[bytes]:
        yield content

    refusal(await check(ready, parts()), "upload_bytes_per_day")
    limit_keys(ready, upload_bytes_per_day=BLOCK_BYTES + 1000)
    assert (await check(ready, parts())).status_code == 200


async def test_an_administrator_sets_limits_and_everybody_sees_them(ready: Application) -> None:
    api_key = await create_api_key(ready, "ci", "read", workspace="w")
    before = await shown(ready, api_key)
    assert before["workspace runs_at_once"]["most"] is None
    await set_limits(ready, runs_at_once=3, runs_per_day="unlimited")
    assert (await shown(ready, api_key))["workspace runs_at_once"]["most"] == 3
    await set_limits(ready, runs_at_once="default")
    assert (await shown(ready, api_key))["workspace runs_at_once"]["most"] is None
    await set_limits(ready, samples_in_flight=64)
    after = await shown(ready, api_key)
    samples = after["workspace samples_in_flight"]
    assert (samples["most"], samples["used"]) == (64, 0)
    assert "API key samples_in_flight" not in after
    for limits in ({"runs": 1}, {"runs_at_once": -1}, {"runs_at_once": "many"}):
        refused = await ready.post("/workspaces/w/quotas", {"limits": limits})
        assert refused.status_code == 400, refused.text
    half_wrong = {"limits": {"runs_per_day": 5, "requests_per_minute": "many"}}
    assert (await ready.post("/workspaces/w/quotas", half_wrong)).status_code == 400
    assert (await shown(ready, api_key))["workspace runs_per_day"]["most"] is None
    bound = await create_api_key(ready, "bound", "admin", workspace="w")
    body = {"limits": {"runs_at_once": 100}}
    answer = await ask(ready, "POST", "/api/v1/workspaces/w/quotas", bound, json=body)
    assert answer.status_code == 403, "a workspace does not raise its own limits"
