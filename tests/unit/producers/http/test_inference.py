"""Deployed models below /v1: found by name, answered by a process that serves, and only for API keys
that may use them."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from infra.model_api.serving import grants, training_watch
from infra.model_api.serving.call import PATH
from infra.model_api.serving.grants import KnownKeys, ServingDoors
from infra.model_api.serving.sessions import DeploymentSessions, deployment_gateway
from infra.model_api.serving.training_watch import TrainingWatch
from infra.model_api.serving.usage import UsageCounts
from producers.http.routes import inference
from schemas.deployments import ServedModel
from schemas.events import (
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelUndeployed,
    RunStopped,
)
from schemas.ids import WorkerId
from schemas.sampling import ModelRef, PolicyRef, SampleRequest, Turn
from tests.kit.application import Application
from tests.kit.fakes import FakeSampler, turn
from tests.kit.story import beginning
from tests.kit.tenants import ask, create_api_key, tenant

pytestmark = pytest.mark.postgres

WORKER = WorkerId("w")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say 3"}]}


def served(name: str = "sums", *, step: int = 2, workspace: str | None = None) -> ServedModel:
    return ServedModel(
        name=name,
        base_name="tiny",
        model=ModelRef(kind="scratch", name="tiny"),
        policy=PolicyRef(version=step),
        lora_alpha=32,
        run="r1",
        run_name="calm-otter",
        step=step,
        workspace=workspace,
    )


async def deploy(app: Application, model: ServedModel, number: int = 1) -> None:
    request = f"q{number}-{model.name}"
    asked = ModelDeployRequested(deployment=model.name, request=request, served=model)
    deployed = ModelDeployed(deployment=model.name, request=request, served=model, number=number)
    await app.append([asked, deployed])


@asynccontextmanager
async def serving(app: Application) -> AsyncIterator[FakeSampler]:
    """A process that serves, in this one. Its use is written at the end."""
    sampler = FakeSampler(lambda request: turn("three"))
    database = app.services.database
    usage, doors = UsageCounts(database), ServingDoors(database)
    sessions = DeploymentSessions(is_known=KnownKeys(doors, WORKER).is_valid, usage=usage)
    gateway = deployment_gateway(sampler, sessions)
    await gateway.start()
    sessions.is_ready = True
    await app.services.effects.register(WORKER, host="h", pid=1, lease_s=60)
    await doors.announce(WORKER, gateway.url + PATH)
    try:
        yield sampler
    finally:
        await gateway.aclose()
        await usage.write()
        await app.services.serving.aclose()


async def chat(app: Application, model: str, api_key: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = {**CHAT, "model": model}
    return await app.api.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_deployment_answers_and_its_use_is_counted(app: Application) -> None:
    await deploy(app, served())
    api_key = await create_api_key(app, "app", "inference")
    async with serving(app) as sampler:
        answer = await chat(app, "tiny:sums", api_key)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "three"
        assert answer.json()["model"] == "tiny:sums"
        assert (await chat(app, "tiny", api_key)).status_code == 200
    assert [request.policy.version for request in sampler.requests] == [2, 0]
    [used] = (await app.get("/deployments/sums"))["deployment"]["usage_by_api_key"]
    assert (used["api_key_name"], used["requests"]) == ("app", 1)
    assert used["completion_tokens"] == answer.json()["usage"]["completion_tokens"]


async def test_a_new_version_is_used_by_the_next_request(app: Application) -> None:
    await deploy(app, served(step=2))
    async with serving(app) as sampler:
        await chat(app, "tiny:sums")
        await deploy(app, served(step=4), number=2)
        app.services.model_directory._read_at = float("-inf")
        await chat(app, "tiny:sums")
    assert [request.policy.version for request in sampler.requests] == [2, 4]


async def test_without_a_process_that_serves_a_client_is_told_to_try_again(
    app: Application,
) -> None:
    await deploy(app, served())
    nobody = await chat(app, "tiny:sums")
    assert nobody.status_code == 503
    assert nobody.headers["retry-after"] == "1"
    assert nobody.json()["error"]["type"] == "server_error"
    await app.services.effects.register(WORKER, host="h", pid=1, lease_s=60)
    doors = ServingDoors(app.services.database)
    await doors.announce(WORKER, "http://127.0.0.1:9/internal/serve")
    assert (await chat(app, "tiny:sums")).status_code == 503, "it has ended, and its lease lives on"
    await app.services.serving.aclose()


async def test_the_models_of_a_workspace_are_those_of_its_api_keys(app: Application) -> None:
    await app.services.database.durable.execute("select 1")
    ours = await tenant(app, "ours", "/repo")
    await deploy(app, served("mine", workspace=ours.workspace), number=1)
    await deploy(app, served("theirs", workspace="another"), number=2)
    api_key = await create_api_key(app, "bound", "inference", workspace="ours")
    listed = (await ask(app, "GET", "/v1/models", api_key)).json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "tiny:mine"]
    async with serving(app):
        assert (await chat(app, "tiny:mine", api_key)).status_code == 200
        refused = await chat(app, "tiny:theirs", api_key)
        assert (await chat(app, "tiny:theirs")).status_code == 200, "the twin: an unbound key"
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    reader = await create_api_key(app, "reader", "read", workspace="ours")
    shown = (await ask(app, "GET", "/api/v1/deployments", reader)).json()["deployments"]
    assert [deployment["name"] for deployment in shown] == ["mine"]


async def test_a_deployment_of_another_workspace_is_in_the_way_without_a_name(
    app: Application,
) -> None:
    ours = await tenant(app, "ours", "/repo")
    await deploy(app, served("theirs", workspace="another"))
    api_key = await create_api_key(app, "bound", "control", workspace="ours")
    asked = {"checkpoint": f"{ours.run}@last", "name": "mine"}
    refused = await ask(app, "POST", "/api/v1/deployments", api_key, json=asked)
    assert refused.status_code == 409, refused.text
    assert "another workspace" in refused.json()["detail"]
    assert "theirs" not in refused.text
    told = await app.post("/deployments", asked)
    assert "the deployment theirs (tiny)" in told.json()["detail"], "the twin: an unbound key"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        (b'{"model": 3}', 400, "invalid_request"),
        (b'{"model": "tiny:nobody"}', 404, "model_not_found"),
        (b'{"model": "\\u0000"}', 404, "model_not_found"),
        (b" " * (8 << 20), 413, "too_large"),
    ],
)
async def test_a_bad_request_has_an_error_of_openai(
    app: Application, body: bytes, status: int, code: str
) -> None:
    refused = await app.api.post("/v1/chat/completions", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    stranger = await app.api.get("/v1/models", headers={"Authorization": "Bearer x"})
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/responses/r1", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method"),
        ("DELETE", "/v1/models/tiny", 405, "method"),
    ],
)
async def test_an_unknown_path_or_model_is_an_error_of_openai(
    app: Application, method: str, path: str, status: int, code: str
) -> None:
    refused = await app.api.request(method, path, json={"model": "tiny", "input": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert path in refused.json()["error"]["message"]
    ours = await app.api.request("POST", "/api/v1/embeddings")
    assert ours.headers["content-type"] == "application/problem+json", "the twin"


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def test_one_key_cannot_hold_the_memory_and_another_is_answered(app: Application) -> None:
    """At both processes: requests that are not answered yet have bytes of their own for each key."""
    await deploy(app, served())
    hostile = await create_api_key(app, "hostile", "inference")
    other = await create_api_key(app, "other", "inference")
    large = {"model": "tiny:sums", "messages": [{"role": "user", "content": "a " * 3_250_000}]}
    may_answer = asyncio.Event()

    async def ask_large() -> httpx.Response:
        return await ask(app, "POST", "/v1/chat/completions", hostile, json=large)

    async with serving(app) as sampler:
        answer_now = sampler.sample

        async def sample(request: SampleRequest) -> Turn:
            if len(request.messages[0].content) > 100:
                await may_answer.wait()
            return await answer_now(request)

        sampler.sample = sample  # type: ignore[method-assign]  # it waits
        asked = [asyncio.ensure_future(ask_large()) for _ in range(7)]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert refused
        assert (await chat(app, "tiny:sums", other)).status_code == 200
        may_answer.set()
        answers = await asyncio.gather(*asked)
        assert Counter(answer.status_code for answer in answers) == {200: 5, 429: 2}
        for answer in answers:
            if answer.status_code == 429:
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "too_many_requests"
        assert (await ask_large()).status_code == 200
        assert app.services.inference_bytes.num_large_bytes == 0


async def test_a_client_that_leaves_frees_its_bytes_and_ends_its_sampling(
    app: Application,
) -> None:
    await deploy(app, served())
    is_sampled, is_cancelled = asyncio.Event(), asyncio.Event()

    async def sample(request: SampleRequest) -> Turn:
        is_sampled.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()
        raise AssertionError

    async with serving(app) as sampler:
        sampler.sample = sample  # type: ignore[method-assign]  # it waits
        asked = asyncio.ensure_future(chat(app, "tiny:sums"))
        async with asyncio.timeout(60):
            await is_sampled.wait()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await is_cancelled.wait()
        assert app.services.inference_bytes.num_large_bytes == 0


@asynccontextmanager
async def breaking_off(
    app: Application, *, meanwhile: Callable[[], Awaitable[object]] | None = None
) -> AsyncIterator[None]:
    """A process that serves and dies after the beginning of its answer. With `meanwhile`, that is called
    after the first piece, and a second one follows."""

    over = asyncio.Event()

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        piece = b'data: {"id": "c1"}\n\n'
        chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
        writer.write(STREAM_HEAD + chunk)
        await asyncio.sleep(0.2)
        if meanwhile is not None:
            await meanwhile()
            writer.write(chunk)
            await asyncio.sleep(0.2)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await app.services.effects.register(WORKER, host="h", pid=1, lease_s=60)
    await ServingDoors(app.services.database).announce(WORKER, f"http://127.0.0.1:{port}/")
    try:
        yield
    finally:
        await over.wait()
        server.close()
        await app.services.serving.aclose()


async def test_a_stream_whose_process_dies_ends_with_an_error(app: Application) -> None:
    await deploy(app, served())
    async with breaking_off(app):
        answer = await chat(app, "tiny:sums")
    begun, said = answer.text.strip().split("\n\n")
    assert begun == 'data: {"id": "c1"}'
    error = json.loads(said.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "unavailable")


async def test_a_stream_ends_when_its_api_key_is_revoked(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "LOOK_S", 0.0)
    await deploy(app, served())
    made = (await app.post("/api-keys", {"name": "leaked", "scopes": ["inference"]})).json()

    async def revoke() -> None:
        assert (await app.api.delete(f"/api/v1/api-keys/{made['api_key']['id']}")).is_success

    async with breaking_off(app, meanwhile=revoke):
        answer = await chat(app, "tiny:sums", made["secret"])
    begun, said = answer.text.strip().split("\n\n")
    assert begun == 'data: {"id": "c1"}'
    assert json.loads(said.removeprefix("data: "))["error"]["code"] == "unauthorized"


async def test_an_api_key_without_the_scope_is_refused(app: Application) -> None:
    reader = await create_api_key(app, "reader", "read", "submit", "control")
    refused = await ask(app, "GET", "/v1/models", reader)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    asker = await create_api_key(app, "asker", "inference")
    assert (await ask(app, "GET", "/v1/models", asker)).status_code == 200  # the twin


async def test_a_row_shows_what_is_served_what_is_loaded_and_what_failed(
    app: Application,
) -> None:
    model = served()
    asked = ModelDeployRequested(deployment="sums", request="q1", served=model)
    await app.append([asked])
    [row] = (await app.get("/deployments"))["deployments"]
    assert (row["status"], row["pending"]) == ("loading", "calm-otter@2")
    await app.append([ModelDeployFailed(deployment="sums", request="q1", message="no room")])
    [row] = (await app.get("/deployments"))["deployments"]
    assert (row["status"], row["pending"], row["error"]) == ("failed", None, "no room")
    await deploy(app, model)
    answer = await app.get("/deployments")
    [row] = answer["deployments"]
    assert (row["status"], row["model"], row["error"]) == ("active", "tiny:sums", None)
    assert (answer["active_deployments"], answer["max_active_deployments"]) == (1, 5)
    await app.append([ModelUndeployed(deployment="sums", request="e1")])
    assert (await app.get("/deployments/sums"))["deployment"]["status"] == "inactive"
    assert (await chat(app, "tiny:sums")).status_code == 404


async def test_serving_has_its_share_only_while_a_run_trains(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_watch, "LOOK_S", 0.0)
    watch = TrainingWatch(app.services.database, share_percent=25)
    assert watch.share() == 0.25, "a run may train until it is known that none does"
    await watch.look()
    assert watch.share() == 1.0
    await app.append(beginning("r1", "first", steps=1))
    await watch.look()
    assert watch.share() == 0.25
    await app.append([RunStopped(run="r1", step=0)])
    await watch.look()
    assert watch.share() == 1.0


async def test_a_key_is_for_one_process_and_expires(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = ServingDoors(app.services.database)
    key = await doors.grant(WORKER)
    assert await KnownKeys(doors, WORKER).is_valid(key)
    assert not await KnownKeys(doors, WorkerId("v")).is_valid(key)
    assert not await KnownKeys(doors, WORKER).is_valid(key + "x")
    rows = await app.services.database.durable.fetch(
        "select encode(sha256, 'escape') || g::text as row from serving_grants g"
    )
    assert not [row for row in rows if key[4:] in row["row"]], "the database holds no key"
    monkeypatch.setattr(grants, "GRANT_S", -1.0)
    expired = await doors.grant(WORKER)
    assert not await KnownKeys(doors, WORKER).is_valid(expired)
