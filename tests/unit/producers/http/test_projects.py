"""The label `project` of runs and evaluations: set in a TOML, shown, and narrowing lists."""

from typing import Any

import pytest

from tests.kit.application import Application, rows
from tests.unit.producers.http.test_submit import config

pytestmark = pytest.mark.postgres


@pytest.fixture
async def ready(app: Application) -> Application:
    assert (await app.upload("numbers", rows(8))).status_code == 200
    assert (await app.post("/workspaces", {"url": "/repo", "name": "w"})).status_code == 201
    return app


def labelled(project: object) -> dict[str, Any]:
    document = config()
    return {**document, "advanced": {**document.get("advanced", {}), "project": project}}


async def names(app: Application, key: str, **parameters: str) -> list[str]:
    found = await app.get(f"/{key}", **parameters)
    assert found["total_count"] == len(found[key])
    return sorted(one["name"] for one in found[key])


async def test_a_list_of_runs_is_narrowed_by_project(ready: Application) -> None:
    for name, document in (("a", labelled("rivers")), ("b", labelled("lakes")), ("c", config())):
        answer = await ready.post("/runs", {"config": document, "name": name})
        assert answer.status_code == 201, answer.text
    await ready.services.readmodel.caught_up(await ready.services.log.visible_head())
    assert await names(ready, "runs", project="rivers") == ["a"]
    assert await names(ready, "runs", project="none") == []
    assert await names(ready, "runs") == ["a", "b", "c"]
    shown = {one["name"]: one["project"] for one in (await ready.get("/runs"))["runs"]}
    assert shown == {"a": "rivers", "b": "lakes", "c": None}
    stored = (await ready.get("/runs/c"))["run"]["config"]
    assert "project" not in stored["advanced"], "a run without the label is recorded as before"


async def test_a_list_of_evaluations_is_narrowed_by_project(ready: Application) -> None:
    experiment = config()["experiment"]
    for name, advanced in (("a", {"project": "rivers"}), ("b", {})):
        body = {"config": {"experiment": experiment, "advanced": advanced}, "name": name}
        answer = await ready.post("/evals", body)
        assert answer.status_code == 201, answer.text
    await ready.services.readmodel.caught_up(await ready.services.log.visible_head())
    assert await names(ready, "evals", project="rivers") == ["a"]
    assert await names(ready, "evals") == ["a", "b"]


@pytest.mark.parametrize("project", ["Rivers", "a_b", "-a", "", "a" * 64, "a/b", "\u00e9", 7])
async def test_another_text_is_not_the_key_of_a_project(
    ready: Application, project: object
) -> None:
    refused = await ready.post("/runs", {"config": labelled(project)})
    assert refused.status_code == 400
    assert refused.json()["issues"][0]["key"] == "advanced.project", refused.text
    if project not in ("", 7):
        listed = await ready.api.get("/api/v1/runs", params={"project": str(project)})
        assert listed.status_code == 400
        assert listed.json()["issues"][0]["key"] == "project"


async def test_a_mistyped_key_is_suggested(ready: Application) -> None:
    document = config()
    advanced = {**document.get("advanced", {}), "projct": "rivers"}
    refused = await ready.post("/runs", {"config": {**document, "advanced": advanced}})
    assert refused.json()["issues"][0]["did_you_mean"] == "advanced.project"
