"""Workspaces, quickstart, secrets and rollouts of the client."""

from typing import Any
from uuid import uuid4

import httpx
import pytest

from schemas.events import CommitRequested, WorkspaceSynced
from schemas.ids import run_stream
from schemas.specs import CommitSpec, DiscoveredRollout, Entrypoint
from tests.kit.application import API_KEY, Application
from tests.kit.specs import ref
from tests.kit.tenants import Tenant, ask, create_api_key

pytestmark = pytest.mark.postgres

BASE, SECRETS = "/api/cli", "/api/cli/environment-secrets"
OURS = {"X-Osmosis-Git": "acme/ours"}
VALUE = "hush-hush-1"


async def call(
    app: Application, method: str, path: str, body: object = None, *, key: str = API_KEY
) -> httpx.Response:
    content = {} if body is None else {"json": body}
    return await ask(app, method, path, key, headers=OURS, **content)


async def read(app: Application, path: str, *, key: str = API_KEY) -> dict[str, Any]:
    answer = await call(app, "GET", path, key=key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_key_lists_the_workspaces_that_it_sees(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    named = {"id": ours.workspace, "name": "ours"}
    repository = {"connected_repo": {"repo_full_name": "acme/ours"}}
    own = await ask(app, "GET", f"{BASE}/workspaces", ours.api_key)
    assert own.json() == {"workspaces": [{**named, **repository}]}
    everything = await ask(app, "GET", f"{BASE}/workspaces", API_KEY)
    assert [one["name"] for one in everything.json()["workspaces"]] == ["ours", "theirs"]
    del theirs


async def test_quickstart_is_completed_by_the_first_run(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    made = await app.post("/workspaces", {"url": "https://git.example/acme/new", "name": "new"})
    new = made.json()["workspace"]["id"]
    for workspace, repository, completed in (
        (ours.workspace, "acme/ours", True),
        (new, "acme/new", False),
    ):
        wanted = {
            "repo": {"connected": True, "full_name": repository},
            "billing_ready": True,
            "completed": completed,
        }
        shown = await ask(app, "GET", f"{BASE}/quickstart?organizationId={workspace}", API_KEY)
        assert shown.json() == wanted
        body = {"organizationId": workspace, "intent": "train"}
        told = await ask(app, "POST", f"{BASE}/quickstart", API_KEY, json=body)
        assert told.json() == wanted
    for query in ("", "?organizationId=", f"?organizationId={theirs.workspace}"):
        answer = await ask(app, "GET", f"{BASE}/quickstart{query}", ours.api_key)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["code"] in ("VALIDATION", "NOT_FOUND")


async def test_secrets_are_set_listed_and_deleted_by_scope(app: Application, ours: Tenant) -> None:
    for scope in ("workspace", "user"):
        body = {"name": "KEY", "value": VALUE, "scope": scope}
        made = await call(app, "POST", SECRETS, body)
        assert made.status_code == 201, made.text
        assert made.json()["id"] == f"{scope}/KEY"
        assert (await call(app, "POST", SECRETS, body)).status_code == 200
        assert VALUE not in made.text
    for scope, wanted in (
        ("all", ["user", "workspace"]),
        ("workspace", ["workspace"]),
        ("user", ["user"]),
    ):
        listed = await read(app, f"{SECRETS}?limit=50&offset=0&scope={scope}")
        assert [one["scope"] for one in listed["environment_secrets"]] == wanted
        assert listed["total_count"] == len(wanted)
    native = await app.get("/secrets", workspace="ours")
    assert {(one["name"], one["scope"]) for one in native["secrets"]} == {
        ("KEY", "workspace"),
        ("KEY", "personal"),
    }
    page = await read(app, f"{SECRETS}?limit=1")
    assert (page["has_more"], page["next_offset"]) == (True, 1)
    for scope in ("workspace", "user"):
        gone = await call(app, "DELETE", SECRETS, {"name": "KEY", "scope": scope})
        assert gone.status_code == 200, gone.text
        again = await call(app, "DELETE", SECRETS, {"name": "KEY", "scope": scope})
        assert again.status_code == 404
    del ours


async def test_secrets_of_another_workspace_are_not_listed(
    app: Application, ours: Tenant, theirs: Tenant
) -> None:
    stored = {"value": VALUE, "scope": "workspace", "workspace": "theirs"}
    made = await app.api.put("/api/v1/secrets/THEIR_KEY", json=stored)
    assert made.status_code == 201, made.text
    for key in (API_KEY, ours.api_key):
        assert (await read(app, SECRETS, key=key))["environment_secrets"] == []
    body = {"name": "THEIR_KEY", "scope": "workspace"}
    assert (await call(app, "DELETE", SECRETS, body)).status_code == 404
    del theirs


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "KEY", "value": VALUE},
        {"name": "KEY", "value": VALUE, "scope": "all"},
        {"name": "KEY", "value": 7, "scope": "user"},
        {"name": "KEY", "value": "short", "scope": "user"},
        {"name": "key", "value": VALUE, "scope": "user"},
        {"name": "K" * 255, "value": VALUE, "scope": "user"},
        {"name": "LD_PRELOAD", "value": VALUE, "scope": "workspace"},
        {"name": "KEY", "value": VALUE + "\0", "scope": "workspace"},
    ],
)
async def test_a_secret_that_may_not_be_is_refused_without_its_value(
    app: Application, ours: Tenant, body: object
) -> None:
    answer = await call(app, "POST", SECRETS, body)
    assert (answer.status_code, answer.json()["code"]) == (400, "VALIDATION")
    assert VALUE not in answer.text
    assert (await read(app, SECRETS))["total_count"] == 0
    del ours


async def test_a_reader_sets_no_secret(app: Application, ours: Tenant) -> None:
    reader = await create_api_key(app, "reader", "read")
    body = {"name": "KEY", "value": VALUE, "scope": "workspace"}
    assert (await call(app, "POST", SECRETS, body, key=reader)).status_code == 403
    assert (await call(app, "DELETE", SECRETS, body, key=reader)).status_code == 403
    del ours


async def sync(app: Application, tenant: Tenant, branch: str | None, sha: str, *names: str) -> None:
    """What sync appends when it fetched a commit for a branch, which has these rollouts."""
    asked = CommitRequested(
        workspace=tenant.workspace,
        workspace_name=tenant.name,
        commit=CommitSpec(url="u", branch=branch),
        requester=None if branch is None else run_stream(f"r{sha[:4]}"),
    )
    [recorded] = await app.services.log.append([asked], cause=uuid4())
    found = [
        DiscoveredRollout(entrypoint=Entrypoint(rollout=name, path="main.py"), workflow="W")
        for name in names
    ]
    synced = WorkspaceSynced(
        workspace=tenant.workspace,
        request=recorded.id,
        commit=sha,
        snapshot=ref("tree"),
        rollouts=tuple(found),
        requester=asked.requester,
    )
    await app.append([synced])


async def test_rollouts_are_those_of_the_branch(app: Application, ours: Tenant) -> None:
    await sync(app, ours, None, "a" * 40, "sums", "words")
    await sync(app, ours, "feature", "b" * 40, "sums", "new")
    await sync(app, ours, "feature", "c" * 40, "new")

    async def listed(query: str = "") -> dict[str, str]:
        found = await read(app, f"{BASE}/rollouts{query}")
        assert found["total_count"] == len(found["rollouts"])
        return {one["name"]: one["last_synced_commit_sha"][0] for one in found["rollouts"]}

    assert await listed() == {"sums": "a", "words": "a"}
    assert await listed("?branch=main") == {"sums": "a", "words": "a"}, "the default branch"
    assert await listed("?branch=feature") == {"new": "c"}
    assert await listed("?branch=absent") == {}
    native = await app.get(f"/workspaces/{ours.name}/rollouts", branch="feature")
    assert [one["commit_sha"][0] for one in native["rollouts"]] == ["c"]
    page = await read(app, f"{BASE}/rollouts?limit=1")
    assert (len(page["rollouts"]), page["has_more"], page["next_offset"]) == (1, True, 1)
    [first] = page["rollouts"]
    assert first["repo_full_name"] == "acme/ours"
    assert first["created_at"] <= first["last_synced_at"]
