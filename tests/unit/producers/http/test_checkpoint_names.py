"""A checkpoint by its name as a model, RUN-step-N: deployed, asked and evaluated under that name, also
where another workspace has a deployment of the same name."""

from collections.abc import Sequence

import pytest

from producers.core.models.model_ref import resolve_model
from schemas.deployments import ref_of_name
from schemas.errors import InvalidConfig
from schemas.events import ModelUndeployed
from tests.kit.application import Application
from tests.kit.tenants import ask, create_api_key, tenant
from tests.unit.producers.http.test_inference import chat, deploy, served, serving

pytestmark = pytest.mark.postgres

ALIAS = "tiny:calm-otter-step-2"


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("my-run-step-20", "my-run@20"),
        ("a-step-4-step-2", "a-step-4@2"),
        ("my-run-step-007", "my-run@7"),
        ("my-run@20", "my-run@20"),
        ("my-run-step-", "my-run-step-"),
        ("-step-3", "-step-3"),
        ("my-run-step-3x", "my-run-step-3x"),
        ("a:b-step-3", "a:b-step-3"),
    ],
)
def test_the_name_of_a_checkpoint_is_its_run_and_step(text: str, ref: str) -> None:
    assert ref_of_name(text) == ref


async def test_a_deployment_answers_to_the_name_of_its_checkpoint(app: Application) -> None:
    await deploy(app, served("sums", step=2))
    async with serving(app):
        answer = await chat(app, ALIAS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == ALIAS
        assert (await chat(app, "tiny:calm-otter-step-4")).status_code == 404, "another step"
        assert (await chat(app, "calm-otter-step-2")).status_code == 404, "without its base"
    assert await requests_of(app, "sums") == 1
    models = (await app.api.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["tiny", "tiny:sums"]


async def requests_of(app: Application, name: str) -> int:
    """How many requests a deployment answered."""
    return int((await app.get(f"/deployments/{name}"))["deployment"]["usage"]["requests"])


async def test_equal_names_of_two_workspaces_are_two_models(app: Application) -> None:
    ours = await tenant(app, "ours", "/repo")
    await deploy(app, served("mine", step=2, workspace=ours.workspace), number=1)
    await deploy(app, served("calm-otter-step-2", step=2, workspace="another"), number=2)
    api_key = await create_api_key(app, "bound", "inference", workspace="ours")
    async with serving(app):
        assert (await chat(app, ALIAS, api_key)).status_code == 200
        assert (await chat(app, ALIAS, api_key)).status_code == 200
        assert (await chat(app, ALIAS)).status_code == 200, "the twin: an unbound key"
    assert await requests_of(app, "mine") == 2
    assert await requests_of(app, "calm-otter-step-2") == 1


async def deployed_as(app: Application, ref: str, api_key: str) -> str:
    """The name that a deployment without a name gets."""
    made = await ask(app, "POST", "/api/v1/deployments", api_key, json={"checkpoint": ref})
    assert made.status_code == 202, made.text
    return str(made.json()["deployment"]["name"])


async def test_a_checkpoint_is_deployed_under_its_name(app: Application) -> None:
    ours = await tenant(app, "ours", "/repo")
    name = f"{ours.run_name}-step-3"
    assert await deployed_as(app, name, ours.api_key) == name
    assert await deployed_as(app, f"{ours.run}@3", ours.api_key) == ours.run_name, "the twin"
    shown = await ask(app, "GET", f"/api/v1/deployments/{name}", ours.api_key)
    assert shown.json()["deployment"]["pending"] == f"{ours.run_name}@3"
    ended = await ask(app, "DELETE", f"/api/v1/deployments/{name}", ours.api_key)
    assert ended.status_code == 202, ended.text


async def test_a_checkpoint_keeps_its_name_whatever_another_workspace_has(
    app: Application,
) -> None:
    ours = await tenant(app, "ours", "/repo")
    name = f"{ours.run_name}-step-3"
    await deploy(app, served(name, workspace="another"))
    await app.append([ModelUndeployed(deployment=name, scope="another", request="q9")])
    assert await deployed_as(app, name, ours.api_key) == name
    shown = await ask(app, "GET", f"/api/v1/deployments/{name}", ours.api_key)
    assert shown.json()["deployment"]["ref"] == f"{ours.workspace}/{name}"
    ended = await ask(app, "DELETE", f"/api/v1/deployments/{name}", ours.api_key)
    assert ended.json()["deployment"]["name"] == name
    theirs = await app.get(f"/deployments/another/{name}")
    assert theirs["deployment"]["pending"] is None


async def refs(app: Application, query: str, api_key: str) -> Sequence[str]:
    answer = await ask(app, "GET", f"/api/v1/checkpoints{query}", api_key)
    assert answer.status_code == 200, answer.text
    listed = answer.json()["checkpoints"]
    assert answer.json()["total_count"] == len(listed)
    return [one["ref"] for one in listed]


async def test_the_checkpoints_of_all_runs_are_listed_for_their_workspace(
    app: Application,
) -> None:
    ours = await tenant(app, "ours", "/repo")
    theirs = await tenant(app, "theirs", "/repo")
    everything = await create_api_key(app, "all", "read")
    assert await refs(app, "", ours.api_key) == [f"{ours.run_name}@3"]
    assert await refs(app, "?tuning=lora", theirs.api_key) == [f"{theirs.run_name}@3"]
    assert await refs(app, "", everything) == [f"{theirs.run_name}@3", f"{ours.run_name}@3"]
    assert await refs(app, "?tuning=full", everything) == []
    refused = await ask(app, "GET", "/api/v1/checkpoints?tuning=x", everything)
    assert refused.status_code == 400


async def test_the_name_of_a_checkpoint_is_a_model_path(app: Application) -> None:
    ours = await tenant(app, "ours", "/repo")
    lookup = app.services.lookup
    run = await lookup.run(ours.run)
    base = run.config.experiment.model_path
    name = f"{ours.run_name}-step-3"
    wanted = await resolve_model(f"{ours.run}@3", seed=0, lookup=lookup)
    for path in (name, f"{base}:{name}"):
        assert await resolve_model(path, seed=0, lookup=lookup) == wanted
    assert (await resolve_model("no-run-step-3", seed=0, lookup=lookup)).kind == "hub"
    with pytest.raises(InvalidConfig):
        await resolve_model(f"another/base:{name}", seed=0, lookup=lookup)
