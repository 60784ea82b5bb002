"""Two organisations that have equal names of everything: each sees its own things by those names, and
the other one's as little as what does not exist."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from infra.identity import api_keys
from infra.ports.actor import Actor
from tests.kit.application import Application, application, rows
from tests.kit.tenants import Tenant, ask, create_api_key, tenant
from tests.unit.producers.http.test_route_rights import TABLE, Row, send

pytestmark = pytest.mark.postgres

MORE = "https://host/Team/more.git"
LIKE_AN_ID = "https://host/team/0123456789abcdef"

LISTS = ("runs", "datasets", "workspaces", "evals", "api-keys", "audit", "organisations")


@pytest.fixture
async def shared(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    repositories = ("/left", "/right", "/more", MORE, LIKE_AN_ID)
    async with application(database_url, tmp_path / "home", repositories=repositories) as app:
        for name in ("left", "right"):
            made = await app.post("/organisations", {"name": name, "title": f"The {name} one"})
            assert made.status_code == 201, made.text
        yield app


@pytest.fixture
async def left(shared: Application) -> Tenant:
    return await tenant(shared, "sums", "/left", organisation="left")


@pytest.fixture
async def right(shared: Application) -> Tenant:
    return await tenant(shared, "sums", "/right", organisation="right")


def by_name(row: Row, owner: Tenant) -> str:
    """The path of a row with names in the place of ids."""
    names = {
        "{run}": owner.run_name,
        "{workspace}": owner.name,
        "{evaluation}": f"{owner.name}-eval",
        "{dataset}": f"{owner.name}-data",
    }
    path = row.path
    for each, name in names.items():
        if f"{each}-" not in path and f"{each}v" not in path:
            path = path.replace(each, name)
    return owner.fill(path)


def hidden(text: str, of: Tenant) -> str:
    """A text without the ids of a tenant, which a request named, and without its organisation."""
    for each in (of.run, of.evaluation, of.workspace, of.dataset, of.verification):
        text = text.replace(each, "absent")
    return text


async def test_another_organisations_ids_answer_like_absent_ones(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    for row in TABLE:
        if row.scope == "open" or "{" not in row.path or row.reach == "installation":
            continue
        if "{run_name}" in row.path and "{run}" not in row.path:
            continue  # a name, which both have
        path = right.fill(row.path)
        answer = await send(shared, row, path, left.api_key, **row.content)
        other = await send(shared, row, hidden(path, right), left.api_key, **row.content)
        assert answer.status_code == other.status_code == 404, (row, answer.text, other.text)
        assert hidden(answer.text, right) == other.text, row


async def test_equal_names_mean_each_organisations_own_things(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    for row in TABLE:
        if row.method != "GET" or "{" not in row.path or row.reach != "workspace":
            continue
        if row.scope == "open" or row.content or row.path.startswith("/compare"):
            continue
        for own, other in ((left, right), (right, left)):
            answer = await send(shared, row, by_name(row, own), own.api_key)
            assert answer.status_code == row.own, (row, answer.text)
            for each in (other.run, other.evaluation, other.workspace, other.dataset):
                assert each not in answer.text, (row, answer.text)


async def test_lists_and_counts_are_of_one_organisation(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    for own, other in ((left, right), (right, left)):
        for path in LISTS:
            answer = await ask(shared, "GET", f"/api/v1/{path}?limit=1000", own.api_key)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert found["total_count"] == len(found[path.replace("-", "_")]) > 0, path
            for each in (other.run, other.evaluation, other.workspace, other.dataset):
                assert each not in answer.text, path
            assert other.organisation not in answer.text, path


async def test_a_key_and_its_list_show_the_names_of_its_organisation_and_workspace(
    shared: Application, left: Tenant
) -> None:
    bound = await create_api_key(
        shared, "bound", "read", organisation="left", workspace=left.workspace
    )
    for api_key, workspace in ((left.api_key, None), (bound, left.name)):
        who = (await ask(shared, "GET", "/api/v1/whoami", api_key)).json()
        assert (who["organisation_name"], who["workspace_name"]) == ("left", workspace)
    found = (await ask(shared, "GET", "/api/v1/api-keys", left.api_key)).json()["api_keys"]
    names = {one["name"]: (one["organisation_name"], one["workspace_name"]) for one in found}
    assert names == {"sums-admin": ("left", None), "bound": ("left", left.name)}


async def test_a_name_that_both_have_is_a_conflict_for_the_operator(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    for path, ids in (
        (f"runs/{left.run_name}", (left.run, right.run)),
        (f"runs/{left.run_name}/stop", (left.run, right.run)),
        (f"datasets/{left.name}-data", (left.dataset, right.dataset)),
        (f"datasets/{left.name}-data/preview", (left.dataset, right.dataset)),
        (f"evals/{left.name}-eval", (left.evaluation, right.evaluation)),
        (f"workspaces/{left.name}", (left.workspace, right.workspace)),
        (f"workspaces/{left.name}/quotas", (left.workspace, right.workspace)),
    ):
        method = "POST" if path.endswith("/stop") else "GET"
        answer = await shared.api.request(method, f"/api/v1/{path}", json=None)
        assert answer.status_code == 409, (path, answer.text)
        assert all(each in answer.json()["detail"] for each in ids), answer.text
        assert "give the id of one" in answer.json()["detail"]
    for run in (left.run, right.run):
        assert (await shared.get(f"/runs/{run}"))["run"]["id"] == run


async def test_an_added_workspace_is_seen_by_the_next_request_of_every_process(
    shared: Application, left: Tenant, database_url: str, tmp_path: Path
) -> None:
    async with application(database_url, tmp_path / "other", repositories=()) as other:
        assert (await ask(other, "GET", "/api/v1/runs", left.api_key)).status_code == 200
        body = {"url": MORE, "name": "more"}
        added = await ask(shared, "POST", "/api/v1/workspaces", left.api_key, json=body)
        assert added.status_code == 201, added.text
        assert added.json()["workspace"]["repository"] == "team/more"
        assert added.json()["workspace"]["organisation"] == "left"
        for process in (other, shared):
            found = await ask(process, "GET", "/api/v1/workspaces/more", left.api_key)
            assert found.status_code == 200, found.text


async def test_the_twin_without_the_guards_list_the_other_organisation_is_seen(
    shared: Application, left: Tenant, right: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Actor, "visible", None)
    seen = await ask(shared, "GET", f"/api/v1/runs/{right.run}", left.api_key)
    assert seen.status_code == 200


async def test_an_organisations_key_adds_no_directory_of_the_server(
    shared: Application, left: Tenant
) -> None:
    for url in ("/more", "file:///more", "FILE:///more", "./more", "~/more", "more"):
        for path in ("workspaces", "workspaces/connect"):
            if (path, url) == ("workspaces/connect", "more"):
                continue  # there it is a name
            answer = await ask(shared, "POST", f"/api/v1/{path}", left.api_key, json={"url": url})
            assert answer.status_code == 400, (url, answer.text)
            assert "directory of the server" in answer.json()["detail"]
    made = await shared.post("/workspaces", {"url": "/more", "organisation": "left"})
    assert made.status_code == 201, "the operator may"


async def test_no_organisation_keeps_another_one_from_making_keys(
    shared: Application, left: Tenant, right: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MOST_OF_ORGANISATION", 3)
    monkeypatch.setattr(api_keys, "MOST_API_KEYS", 8)

    async def make(own: Tenant, name: str) -> int:
        body = {"name": name, "scopes": ["read"]}
        answer = await ask(shared, "POST", "/api/v1/api-keys", own.api_key, json=body)
        assert answer.status_code == 201 or "too many API keys" in answer.text
        return answer.status_code

    assert [await make(left, f"k{number}") for number in range(6)] == [201, 201, *[409] * 4]
    assert await make(right, "own") == 201
    revoked = await ask(shared, "DELETE", "/api/v1/api-keys/k0", left.api_key)
    assert revoked.status_code == 200
    assert await make(left, "again") == 201


async def test_no_workspace_is_named_like_an_id_after_its_repository(
    shared: Application, left: Tenant
) -> None:
    added = await ask(shared, "POST", "/api/v1/workspaces", left.api_key, json={"url": LIKE_AN_ID})
    assert added.status_code == 201, added.text
    assert added.json()["workspace"]["name"] == "workspace-0123456789abcdef"


async def test_nobody_makes_a_key_of_another_organisation(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    asked: list[dict[str, Any]] = [
        {"organisation": "right"},
        {"organisation": "nothing"},
        {"workspace": right.workspace},
    ]
    for wanted in asked:
        body = {"name": "x", "scopes": ["read"], **wanted}
        answer = await ask(shared, "POST", "/api/v1/api-keys", left.api_key, json=body)
        assert answer.status_code == 404, answer.text
    body = {"name": "x", "scopes": ["metrics"]}
    answer = await ask(shared, "POST", "/api/v1/api-keys", left.api_key, json=body)
    assert answer.status_code in (400, 403), answer.text
    body = {"name": "x", "scopes": ["read"]}
    made = await ask(shared, "POST", "/api/v1/api-keys", left.api_key, json=body)
    assert made.status_code == 201
    seen = await ask(shared, "GET", f"/api/v1/runs/{right.run}", made.json()["secret"])
    assert seen.status_code == 404
    inner = await create_api_key(shared, "inner", "admin", workspace=left.workspace)
    beyond = await ask(
        shared, "POST", "/api/v1/api-keys", inner, json={**body, "organisation": "left"}
    )
    own = (await ask(shared, "GET", "/api/v1/api-keys", inner)).json()["api_keys"]
    assert beyond.status_code == 201
    assert {key["workspace"] for key in own} == {left.workspace}, "it is bound like its maker"


async def test_a_shared_dataset_is_of_its_organisation(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    await shared.upload("common", rows(4))
    for own in (left, right):
        answer = await ask(shared, "GET", "/api/v1/datasets/common", own.api_key)
        assert answer.status_code == 404, "that of main is not theirs"
    inner = await create_api_key(shared, "inner", "admin", workspace=left.workspace)
    read = await ask(shared, "GET", f"/api/v1/datasets/{left.name}-data/content", inner)
    assert read.status_code == 200
    kept = await ask(shared, "DELETE", f"/api/v1/datasets/{left.name}-data", inner)
    assert (kept.status_code, "shared" in kept.text) == (409, True)
    gone = await ask(shared, "DELETE", f"/api/v1/datasets/{left.name}-data", left.api_key)
    assert gone.status_code == 200, gone.text
    still = await ask(shared, "GET", f"/api/v1/datasets/{right.name}-data", right.api_key)
    assert still.json()["dataset"]["id"] == right.dataset


async def test_an_idempotency_key_is_each_organisations_own(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    seen = []
    for own in (left, right):
        answer = await shared.api.post(
            f"/api/v1/runs/{own.run}/verify",
            json={},
            headers={"Authorization": f"Bearer {own.api_key}", "Idempotency-Key": "one"},
        )
        assert answer.status_code == 202, answer.text
        seen.append(answer.json()["verification"]["id"])
    assert len(set(seen)) == 2


async def test_names_of_organisations_are_checked(shared: Application) -> None:
    await_all = ["Left", "ünder", "a..b", "../x", "a" * 300, "", "-a", "a b", "0123456789abcdef"]
    for name in await_all:
        answer = await shared.post("/organisations", {"name": name})
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["issues"][0]["key"] == "name"
    again = await shared.post("/organisations", {"name": "left"})
    assert again.status_code == 409
    for title in ("\n", "a\x00b", "x" * 300):
        answer = await shared.post("/organisations", {"name": "third", "title": title})
        assert answer.status_code == 400, (title, answer.text)


async def test_no_organisation_is_named_like_a_path_of_the_api(shared: Application) -> None:
    paths = {row.path.split("/")[3].partition("?")[0] for row in TABLE if "/api/v1/" in row.path}
    assert len(paths) > 15
    for name in sorted(paths):
        answer = await shared.post("/organisations", {"name": name})
        assert answer.status_code == 400, (name, answer.text)


async def test_a_repository_names_a_workspace_and_moves(
    shared: Application, left: Tenant, right: Tenant
) -> None:
    workspaces = shared.services.workspaces
    path = f"workspaces/{left.workspace}/repository"
    for own in (left, right):
        named = await ask(
            shared,
            "PUT",
            f"/api/v1/workspaces/{own.workspace}/repository",
            own.api_key,
            json={"repository": "Team/Sums"},
        )
        assert named.status_code == 200, named.text
        assert named.json()["workspace"]["repository"] == "team/sums"
    theirs = await ask(
        shared,
        "PUT",
        f"/api/v1/workspaces/{right.workspace}/repository",
        left.api_key,
        json={"repository": "team/taken"},
    )
    assert theirs.status_code == 404
    for bad in ("sums", "a/b/c", "../x", "a/..", "ü/x", "a/" + "b" * 300, "a b/c"):
        answer = await ask(shared, "PUT", f"/api/v1/{path}", left.api_key, json={"repository": bad})
        assert answer.status_code == 400, (bad, answer.text)
    moved = await ask(
        shared, "PUT", f"/api/v1/{path}", left.api_key, json={"repository": "other/sums"}
    )
    assert moved.status_code == 200
    assert (await workspaces.of_repository("other/sums")).id == left.workspace
    assert (await workspaces.of_repository("team/sums")).id == right.workspace


async def test_many_requests_at_once_share_few_queries(shared: Application, left: Tenant) -> None:
    recent = shared.services.recent_workspaces
    asked = 0
    read = recent._read

    async def count(organisation: str) -> frozenset[str]:
        nonlocal asked
        asked += 1
        return await read(organisation)

    recent._read = count
    answers = await asyncio.gather(
        *(ask(shared, "GET", "/api/v1/runs", left.api_key) for _ in range(32))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert 0 < asked < 32
