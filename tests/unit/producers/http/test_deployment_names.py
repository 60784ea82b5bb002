"""The name of a deployment is unique in its workspace: two organisations that use the same one do not
notice each other, and who sees both says which one is meant."""

import asyncio
from typing import Any

import pytest

from schemas.deployments import ServedModel
from schemas.events import (
    Event,
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelUndeployed,
)
from tests.kit.application import Application
from tests.kit.tenants import Tenant, ask, create_api_key, tenant
from tests.unit.producers.http.test_inference import chat, served, serving

pytestmark = pytest.mark.postgres


async def organisations(app: Application) -> tuple[Tenant, Tenant]:
    """Two organisations with a workspace of the same name each."""
    for name in ("north", "south"):
        assert (await app.post("/organisations", {"name": name})).status_code == 201
    return (
        await tenant(app, "sums", "/repo", organisation="north"),
        await tenant(app, "sums", "/repo", organisation="south"),
    )


async def request_deployment(app: Application, owner: Tenant) -> None:
    """Ask for the deployment `same` of the organisation's run, as a client does."""
    asked = {"checkpoint": f"{owner.run_name}@last", "name": "same"}
    answer = await ask(app, "POST", "/api/v1/deployments", owner.api_key, json=asked)
    assert answer.status_code == 202, answer.text
    assert answer.json()["deployment"]["ref"] == f"{owner.workspace}/same"


async def loaded(app: Application, owner: Tenant, *, step: int, number: int) -> None:
    """What the deploy consumer appends once the checkpoint is loaded."""
    model = served("same", step=step, workspace=owner.workspace)
    request = f"q{number}"
    begun = ModelDeployRequested(
        deployment="same", scope=owner.workspace, request=request, served=model
    )
    event = ModelDeployed(
        deployment="same", scope=owner.workspace, request=request, served=model, number=number
    )
    await app.append([begun, event])


async def test_two_organisations_deploy_and_ask_equal_names(app: Application) -> None:
    north, south = await organisations(app)
    await asyncio.gather(request_deployment(app, north), request_deployment(app, south))
    await loaded(app, north, step=2, number=1)
    await loaded(app, south, step=4, number=2)
    keys = [
        await create_api_key(
            app, f"app-{one.organisation}", "inference", organisation=one.organisation
        )
        for one in (north, south)
    ]
    async with serving(app) as sampler:
        for key in (*keys, keys[0]):
            assert (await chat(app, "tiny:same", key)).status_code == 200
        models = [(await ask(app, "GET", "/v1/models", key)).json()["data"] for key in keys]
    assert [request.policy.version for request in sampler.requests] == [2, 4, 2]
    assert [[one["id"] for one in listed] for listed in models] == [["tiny", "tiny:same"]] * 2
    for owner, requests in ((north, 2), (south, 1)):
        answer = await ask(app, "GET", "/api/v1/deployments/same", owner.api_key)
        found = answer.json()["deployment"]
        assert found["workspace"] == owner.workspace
        assert found["usage"]["requests"] == requests
        assert [use["requests"] for use in found["usage_by_api_key"]] == [requests]
    assert (await ask(app, "DELETE", "/api/v1/deployments/same", north.api_key)).status_code == 202
    scope, request = north.workspace, "e1"
    await app.append([ModelUndeployed(deployment="same", scope=scope, request=request)])
    statuses = [
        (await ask(app, "GET", "/api/v1/deployments/same", one.api_key)).json()["deployment"][
            "status"
        ]
        for one in (north, south)
    ]
    assert statuses == ["inactive", "active"]


async def test_the_name_of_another_organisation_is_absent(app: Application) -> None:
    """As absent as one that nobody has, in each way to ask for it."""
    north, south = await organisations(app)
    await loaded(app, south, step=4, number=1)
    app.services.model_directory._read_at = float("-inf")
    for method, name in (("GET", "same"), ("GET", f"{south.workspace}/same"), ("DELETE", "same")):
        refused = await ask(app, method, f"/api/v1/deployments/{name}", north.api_key)
        other = name.replace("same", "none")
        unknown = await ask(app, method, f"/api/v1/deployments/{other}", north.api_key)
        assert refused.status_code == unknown.status_code == 404
        assert refused.text.replace("same", "none") == unknown.text
    key = await create_api_key(app, "north-app", "inference", organisation="north")
    for name in ("tiny:same", f"tiny:{south.workspace}/same", "tiny"):
        refused = await chat(app, name, key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert (await ask(app, "GET", "/v1/models", key)).json()["data"] == []
    listed = (await ask(app, "GET", "/api/v1/deployments", north.api_key)).json()
    assert (listed["deployments"], listed["active_deployments"]) == ([], 0)
    seen = await ask(app, "GET", f"/api/v1/deployments/{south.workspace}/same", south.api_key)
    assert seen.status_code == 200, "the twin"


async def test_a_key_that_sees_several_names_the_workspace(app: Application) -> None:
    ours = await tenant(app, "ours", "/repo")
    theirs = await tenant(app, "theirs", "/repo")
    await loaded(app, ours, step=2, number=1)
    await loaded(app, theirs, step=4, number=2)
    async with serving(app) as sampler:
        refused = await chat(app, "tiny:same")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "ambiguous_model")
        assert "tiny:ours/same, tiny:theirs/same" in refused.json()["error"]["message"]
        for name in ("tiny:theirs/same", f"tiny:{ours.workspace}/same"):
            assert (await chat(app, name)).status_code == 200
        checkpoint = await chat(app, "tiny:ours/calm-otter-step-2")
        assert checkpoint.status_code == 200, checkpoint.text
    assert [request.policy.version for request in sampler.requests] == [4, 2, 2]
    listed = (await app.api.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == ["tiny", "tiny:ours/same", "tiny:theirs/same"]
    several = await app.api.get("/api/v1/deployments/same")
    assert several.status_code == 409
    assert "ours/same, theirs/same; give one of these" in several.json()["detail"]
    for place in ("theirs", theirs.workspace):
        shown = (await app.get(f"/deployments/{place}/same"))["deployment"]
        assert (shown["workspace_name"], shown["step"]) == ("theirs", 4)
    page = await app.api.get(f"/deployments/{theirs.workspace}/same")
    assert page.status_code in (200, 303), page.text


async def test_a_deployment_of_no_workspace_is_named_by_a_dash(app: Application) -> None:
    ours = await tenant(app, "ours", "/repo")
    await loaded(app, ours, step=2, number=1)
    model = served("same", step=6)
    await app.append(
        [ModelDeployed(deployment="same", scope="", request="q", served=model, number=2)]
    )
    async with serving(app) as sampler:
        assert (await chat(app, "tiny:same")).status_code == 400
        assert (await chat(app, "tiny:-/same")).status_code == 200
    assert [request.policy.version for request in sampler.requests] == [6]
    assert (await app.get("/deployments/-/same"))["deployment"]["step"] == 6


async def test_twin_use_that_is_counted_by_name_shows_what_others_used(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedModel, "full_name", ServedModel.model_name)
    ours = await tenant(app, "ours", "/repo")
    await loaded(app, ours, step=2, number=1)
    async with serving(app):
        assert (await chat(app, "tiny:same")).status_code == 200
    other = served("same", workspace="another")
    assert await app.services.readmodel.deployments.usage(other), "the collision"
    monkeypatch.undo()
    assert not await app.services.readmodel.deployments.usage(other)


def before(event: Any) -> Event:
    """An event as an earlier release wrote it: without the workspace of its name."""
    made: Event = event.model_copy(update={"scope": None})
    return made


def history() -> list[Event]:
    """A name that w1 deployed, that was refused to w2, that w1 gave up, and that w2 deployed then."""

    def asked(request: str, workspace: str, step: int) -> Event:
        model = served("same", step=step, workspace=workspace)
        return before(ModelDeployRequested(deployment="same", request=request, served=model))

    def active(request: str, workspace: str, step: int, number: int) -> Event:
        model = served("same", step=step, workspace=workspace)
        return before(
            ModelDeployed(deployment="same", request=request, served=model, number=number)
        )

    return [
        asked("q1", "w1", 2),
        active("q1", "w1", 2, 1),
        asked("q2", "w2", 4),
        before(ModelDeployFailed(deployment="same", request="q2", message="in use")),
        before(ModelUndeployed(deployment="same", request="e1")),
        asked("q3", "w2", 6),
        active("q3", "w2", 6, 2),
        asked("q4", "w2", 8),
    ]


ROWS = (
    "select key, status, pending, error, request, number, served::json ->> 'step' as step"
    " from deployments order by key"
)


@pytest.mark.parametrize("at_once", [False, True])
async def test_events_of_earlier_releases_are_projected_in_their_order(
    app: Application, *, at_once: bool
) -> None:
    """One by one, and all in one batch."""
    events = history()
    for batch in [events] if at_once else [[event] for event in events]:
        await app.append(batch)
    rows = [tuple(row) for row in await app.database.durable.fetch(ROWS)]
    assert rows == [
        ("w1/same", "inactive", "", "", "", 1, "2"),
        ("w2/same", "active", "calm-otter@8", "", "q4", 2, "6"),
    ]
