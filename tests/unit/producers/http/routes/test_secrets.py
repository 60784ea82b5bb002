"""Secrets over HTTP: values go in and never come out, and a run needs those that it requires."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.identity.secrets.local import LocalKey
from infra.identity.secrets.sealed import Sealer
from infra.ports.actor import Actor, acting_as
from infra.repositories.forge_connections import ForgeConnections
from producers.core.secrets import OwnedBy
from schemas.errors import NotFound
from schemas.events import EvaluationRequested, RunRequested
from schemas.ids import eval_stream, run_stream
from schemas.secrets.rules import MOST_BYTES
from schemas.secrets.secret_value import SecretValue
from tests.kit.application import Application, application, rows

pytestmark = pytest.mark.postgres

VALUE = "hush-hush-1"


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    """An application that has a dataset and a workspace."""
    async with application(database_url, tmp_path / "home", repositories=("/repo", "/b")) as served:
        assert (await served.upload("numbers", rows(8))).status_code == 200
        assert (await served.post("/workspaces", {"url": "/repo", "name": "w"})).is_success
        yield served


async def put(app: Application, name: str, **body: Any) -> httpx.Response:
    return await app.api.put(f"/api/v1/secrets/{name}", json={"value": VALUE, **body})


async def test_a_value_goes_in_and_no_answer_holds_it(app: Application) -> None:
    made = await put(app, "KEY")
    assert made.status_code == 201, made.text
    assert (await put(app, "KEY")).status_code == 200
    assert (await put(app, "KEY", scope="personal")).status_code == 201
    listed = await app.get("/secrets")
    assert [(one["name"], one["scope"], one["workspace"]) for one in listed["secrets"]] == [
        ("KEY", "personal", None),
        ("KEY", "workspace", "w"),
    ]
    assert {one["created_by"] for one in listed["secrets"]} == {"admin/root"}
    assert VALUE not in made.text + str(listed)
    for method in ("GET", "POST", "PATCH"):
        answer = await app.api.request(method, "/api/v1/secrets/KEY")
        assert answer.status_code == 405
        assert VALUE not in answer.text


async def test_the_scope_and_workspace_of_the_query_count_as_those_of_the_body(
    app: Application,
) -> None:
    body = {"value": VALUE}
    made = await app.api.put("/api/v1/secrets/KEY?scope=personal", json=body)
    assert made.status_code == 201, made.text
    assert made.json()["secret"]["scope"] == "personal"
    there = await app.api.put("/api/v1/secrets/KEY?workspace=absent", json=body)
    assert there.status_code == 404
    both = {**body, "scope": "workspace"}
    refused = await app.api.put("/api/v1/secrets/KEY?scope=personal", json=both)
    assert refused.status_code == 400
    assert "give it once" in refused.text
    assert VALUE not in refused.text
    assert len((await app.get("/secrets"))["secrets"]) == 1


async def test_a_deleted_secret_is_gone(app: Application) -> None:
    await put(app, "KEY")
    personal = {"scope": "personal"}
    missing = await app.api.delete("/api/v1/secrets/KEY", params=personal)
    assert (missing.status_code, missing.json()["code"]) == (404, "NOT_FOUND")
    assert (await app.api.delete("/api/v1/secrets/KEY", params={"workspace": "w"})).is_success
    assert (await app.get("/secrets"))["secrets"] == []


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("key", {}),
        ("PATH", {}),
        ("KEY", {"value": "b1!"}),
        ("KEY", {"value": "hush-hush-\0-nul"}),
        ("KEY", {"value": ["hush-hush-list"]}),
        ("KEY", {"value": "hush" * MOST_BYTES}),
        ("KEY", {"value": None}),
        ("KEY", {"scope": "everybody"}),
        ("KEY", {"scope": "personal", "workspace": "w"}),
        ("KEY", {"hush-hush-field": 1}),
    ],
)
async def test_a_bad_request_is_refused_and_its_value_not_shown(
    app: Application, name: str, body: dict[str, Any]
) -> None:
    refused = await put(app, name, **body)
    assert refused.status_code == 400, refused.text
    assert str(body.get("value", VALUE))[:20] not in refused.text
    assert (await app.get("/secrets"))["secrets"] == []


async def test_without_a_name_there_must_be_only_one_workspace(app: Application) -> None:
    assert (await app.post("/workspaces", {"url": "/b", "name": "b"})).is_success
    refused = await put(app, "KEY")
    assert refused.json()["detail"].endswith("name one of: w, b (--workspace)")
    assert (await put(app, "KEY", workspace="b")).is_success
    unknown = await put(app, "KEY", workspace="none")
    assert unknown.status_code == 404


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "experiment": {
            "rollout": "say",
            "entrypoint": "main.py",
            "model_path": "scratch:qwen3-tiny",
            "dataset": "numbers",
        },
        "secrets": {"required": ["KEY", "OTHER"]},
        **sections,
    }


async def test_an_api_key_of_one_workspace_sees_no_other_one(app: Application) -> None:
    assert (await app.post("/workspaces", {"url": "/b", "name": "b"})).is_success
    assert (await put(app, "KEY", workspace="b")).is_success
    mine = (await app.services.workspaces.find_workspace("w")).id
    keeping = app.services.secrets
    actor = Actor("t", "ann", frozenset({"control"}), workspace=mine)
    with acting_as(actor):
        await keeping.put_secret(OwnedBy("ann"), "OTHER", SecretValue(VALUE), author="ann/t")
        found, _ = await keeping.all_secrets("ann", None)
        assert [one.name for one in found] == ["OTHER"]
        with pytest.raises(NotFound):
            await keeping.all_secrets("ann", "b")
        with pytest.raises(NotFound):
            await keeping.put_secret(
                OwnedBy("ann", workspace="b"), "KEY", SecretValue("of-somebody"), author="ann/t"
            )
        with pytest.raises(NotFound):
            await keeping.delete(OwnedBy("ann", workspace="b"), "KEY")


RUN = {"training": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}}


@pytest.mark.parametrize(("path", "more"), [("/runs", RUN), ("/evals", {})])
async def test_required_secrets_must_be_set_before_the_submit(
    app: Application, path: str, more: dict[str, Any]
) -> None:
    refused = await app.post(path, {"config": config(**more)})
    assert refused.status_code == 400
    [issue] = refused.json()["issues"]
    assert issue["key"] == "secrets.required"
    assert "KEY, OTHER are not set; set each with: headrace secret set KEY" in issue["message"]
    assert (await put(app, "KEY")).is_success
    assert (await put(app, "OTHER", scope="personal")).is_success
    made = await app.post(path, {"config": config(**more)})
    assert made.status_code == 201, made.text
    answer = made.json()
    identity = (answer.get("run") or answer["eval"])["id"]
    stream = run_stream(identity) if path == "/runs" else eval_stream(identity)
    first = (await app.services.log.load({stream: 0}))[stream][0].event
    assert isinstance(first, RunRequested | EvaluationRequested)
    assert first.submitter == "admin"
    assert VALUE not in first.model_dump_json()
    assert (await app.get("/secrets"))["secrets"][0]["used_at"] is None, "no value was read"


async def test_the_key_is_replaced_for_secrets_and_connections(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(app, "KEY")
    old = LocalKey(lambda: (app.services.settings.home / "secret.key").read_bytes())
    connections = app.services.connections
    await connections.put_connection("w", forge="github", url="https://forge.example/o/r")
    before = await connections.get_connection("w")
    new = LocalKey(lambda: b"n" * 32)
    sealer = app.services.sealer
    former = sealer._current
    del old
    monkeypatch.setattr(sealer, "_current", new)
    monkeypatch.setattr(sealer, "_old", [former])
    done = await app.post("/secrets/rotate-key", {})
    assert done.json()["secrets"] == 1
    assert done.json()["connections"] == 1
    assert done.json()["key"] == await new.key_id()
    assert await ForgeConnections(app.database, Sealer(new)).get_connection("w") == before
    values = await app.services.secret_store.resolve(["KEY"], workspace=None, submitter=None)
    assert values == {}
    [stored] = (await app.get("/secrets"))["secrets"]
    assert stored["key"] == await new.key_id()
