"""Quotas of organisations, and those that an owner sets for a workspace, where two control processes
serve one database."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.identity import quotas
from infra.identity.quotas import Quotas
from schemas.errors import QuotaExceeded
from tests.kit.application import Application, application, rows
from tests.kit.tenants import ask, create_api_key
from tests.unit.producers.http.test_submit import config

pytestmark = pytest.mark.postgres

FILE = rows(4).encode()


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    repositories = ("/left", "/right", *(f"https://host/left/r{n}.git" for n in range(6)))
    async with application(database_url, tmp_path / "home", repositories=repositories) as served:
        for name in ("left", "right"):
            assert (await served.post("/organisations", {"name": name})).status_code == 201
            place = {"url": f"/{name}", "name": "w", "organisation": name}
            assert (await served.post("/workspaces", place)).status_code == 201
        yield served


@pytest.fixture
async def other(app: Application, database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    """Another control process of the same installation."""
    repositories = tuple(f"https://host/left/r{n}.git" for n in range(6))
    async with application(database_url, tmp_path / "o", repositories=repositories) as served:
        yield served


async def limit(app: Application, organisation: str = "left", **limits: object) -> None:
    path = f"/organisations/{organisation}/quotas"
    answer = await app.post(path, {"limits": limits})
    assert answer.status_code == 200, answer.text


async def used(app: Application, organisation: str = "left") -> Mapping[str, int]:
    found = await app.get(f"/organisations/{organisation}/quotas")
    return {one["name"]: one["used"] for one in found["quotas"]}


async def owner_key(app: Application, organisation: str = "left") -> str:
    return await create_api_key(app, f"{organisation}-ops", "admin", organisation=organisation)


def refusal(answer: httpx.Response, name: str, most: int, has: int) -> str:
    assert answer.status_code == 429, answer.text
    document = answer.json()
    assert document["code"] == "QUOTA_EXCEEDED"
    text = str(document["detail"])
    assert f"quota {name}: this organisation may have {most} " in text
    assert f" and has {has}" in text
    assert "`headrace org quotas left`" in text
    assert "the operator of the installation may raise it" in text
    assert "subscription" not in text.lower(), "a client would report a problem with billing"
    return text


async def begin(app: Application, api_key: str, name: str, size: int) -> httpx.Response:
    body = {"name": name, "file_name": "r.jsonl", "file_size": size}
    return await ask(app, "POST", "/api/v1/datasets", api_key, json=body)


async def send_whole(app: Application, api_key: str, name: str) -> httpx.Response:
    body = {"name": name, "file_name": "r.jsonl"}
    made = await ask(app, "POST", "/api/v1/datasets", api_key, json=body)
    return await ask(app, "PUT", made.json()["upload"]["path"], api_key, content=FILE)


async def invite(app: Application, organisation: str = "left") -> str:
    made = await app.post(f"/organisations/{organisation}/invitations", {"role": "owner"})
    return str(made.json()["url"]).partition("/join?code=")[2]


async def num_granted(*attempts: Awaitable[object]) -> int:
    """How many of these attempts at one moment are not refused by a quota."""
    found = await asyncio.gather(*attempts, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, QuotaExceeded):
            raise one
    return sum(not isinstance(one, QuotaExceeded) for one in found)


async def test_all_workspaces_of_an_organisation_share_its_runs(
    app: Application, other: Application
) -> None:
    api_key, stranger = await owner_key(app), await owner_key(app, "right")
    more = {"url": "https://host/left/r0.git", "name": "more"}
    assert (await ask(app, "POST", "/api/v1/workspaces", api_key, json=more)).status_code == 201
    for key in (api_key, stranger):
        assert (await send_whole(app, key, "numbers")).status_code == 200
    await limit(app, runs_at_once=1)

    async def submit(served: Application, key: str, workspace: str) -> httpx.Response:
        body = {"config": config(), "workspace": workspace}
        return await ask(served, "POST", "/api/v1/runs", key, json=body)

    answers = await asyncio.gather(
        *(submit(one, api_key, name) for one in (app, other) for name in ("w", "more"))
    )
    assert sorted(one.status_code for one in answers) == [201, 429, 429, 429]
    refused = next(one for one in answers if one.status_code == 429)
    assert "it frees when one of them ends" in refusal(refused, "runs_at_once", 1, 1)
    for _ in range(2):
        assert (await submit(app, stranger, "w")).status_code == 201, "another organisation"
    assert (await used(app))["runs_at_once"] == 1
    assert (await used(app, "right"))["runs_at_once"] == 2


async def test_uploads_count_from_their_beginning_until_their_end(
    app: Application, other: Application
) -> None:
    api_key, stranger = await owner_key(app), await owner_key(app, "right")
    await limit(app, stored_bytes=1000)
    answers = await asyncio.gather(
        *(begin(one, api_key, f"d{n}", 600) for n, one in enumerate((app, other) * 3))
    )
    assert sorted(one.status_code for one in answers) == [201] + [429] * 5
    refused = next(one for one in answers if one.status_code == 429)
    text = refusal(refused, "stored_bytes", 1000, 600)
    assert "and 600 more are wanted" in text
    assert (await begin(app, stranger, "d", 5000)).status_code == 201, "another organisation"
    assert (await used(app))["stored_bytes"] == 600
    [upload] = [one.json()["dataset"]["id"] for one in answers if one.status_code == 201]
    path = f"/api/v1/datasets/{upload}/abort"
    assert (await ask(app, "POST", path, api_key)).status_code == 200
    assert (await used(app))["stored_bytes"] == 0
    assert (await begin(app, api_key, "e", 900)).status_code == 201
    await app.database.durable.execute(
        "update uploads set created_at = created_at - interval '2 days'"
    )
    await app.services.transfers.uploads.collect()
    assert (await used(app))["stored_bytes"] == 0, "an upload that nobody finished has ended"


async def test_stored_files_count_until_their_dataset_is_deleted(app: Application) -> None:
    api_key = await owner_key(app)
    await limit(app, stored_bytes=len(FILE) + 1)
    assert (await send_whole(app, api_key, "numbers")).status_code == 200
    assert (await used(app))["stored_bytes"] == len(FILE)
    refusal(await send_whole(app, api_key, "more"), "stored_bytes", len(FILE) + 1, len(FILE))
    refusal(await begin(app, api_key, "more", 2), "stored_bytes", len(FILE) + 1, len(FILE))
    assert (await begin(app, api_key, "more", 1)).status_code == 201
    gone = await ask(app, "DELETE", "/api/v1/datasets/numbers", api_key)
    assert gone.status_code == 200, gone.text
    assert (await used(app))["stored_bytes"] == 1
    left = await app.database.durable.fetchval("select count(*) from admitted_amounts")
    assert left == 0, "what is stored counts by itself"


async def test_members_who_join_at_one_moment_stay_within_the_limit(
    app: Application, other: Application
) -> None:
    await limit(app, members=2)
    codes = [await invite(app) for _ in range(6)]

    async def join(number: int) -> object:
        served = (app, other)[number % 2]
        name = f"p{number}"
        return await served.services.invitations.accept(codes[number], name, f"{name}@example.org")

    assert await num_granted(*map(join, range(6))) == 2
    assert (await used(app))["members"] == 2
    answer = await app.get("/organisations/left/invitations")
    assert len(answer["invitations"]) == 4, "the invitation of who was refused stays"
    code = await invite(app, "right")
    await app.services.invitations.accept(code, "q", "q@example.org")


async def test_workspaces_that_are_added_at_one_moment_stay_within_the_limit(
    app: Application, other: Application
) -> None:
    api_key = await owner_key(app)
    await limit(app, workspaces=3)

    async def add(number: int) -> httpx.Response:
        body = {"url": f"https://host/left/r{number}.git", "name": f"r{number}"}
        return await ask((app, other)[number % 2], "POST", "/api/v1/workspaces", api_key, json=body)

    answers = await asyncio.gather(*map(add, range(6)))
    assert sorted(one.status_code for one in answers) == [201] * 2 + [429] * 4
    refused = next(one for one in answers if one.status_code == 429)
    assert "none of them can be removed" in refusal(refused, "workspaces", 3, 3)
    [again] = [n for n, one in enumerate(answers) if one.status_code == 201][:1]
    assert (await add(again)).status_code == 201, "one that is there is fetched again"


async def test_deployments_of_one_moment_stay_within_the_limit(
    app: Application, other: Application
) -> None:
    await limit(app, deployments=2)
    workspace = (await app.get("/organisations/left"))["workspaces"][0]["id"]

    def admit(number: int) -> Awaitable[None]:
        served = (app, other)[number % 2].services
        return served.quotas.admit_deployment(f"d{number}", workspace=workspace)

    assert await num_granted(*map(admit, range(8))) == 2
    assert (await used(app))["deployments"] == 2
    rows_ = await app.database.durable.fetch("select id from admitted_amounts")
    names = [str(row["id"]).partition("/")[2] for row in rows_]
    await app.services.quotas.admit_deployment(names[0], workspace=workspace)
    await app.services.quotas.withdraw_deployment(names[0], workspace=workspace)
    assert (await used(app))["deployments"] == 1
    await app.database.durable.execute(
        "insert into deployments (deployment, workspace, status, created_at)"
        " values ($1, $2, 'inactive', clock_timestamp())",
        names[1],
        workspace,
    )
    assert (await used(app))["deployments"] == 0, "it was deployed and undeployed"


async def test_without_the_lock_several_get_the_last_place(
    app: Application, other: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the tests above: their requests do meet."""
    statements = {name: quotas.SQL[name] for name in quotas.SQL.names}
    statements["lock_holder"] = "select $1::text"
    monkeypatch.setattr(quotas, "SQL", statements)
    await limit(app, deployments=1)
    workspace = (await app.get("/organisations/left"))["workspaces"][0]["id"]
    both = asyncio.Barrier(2)
    count = Quotas._count

    async def count_together(*arguments: Any) -> int:
        found = await count(*arguments)
        async with asyncio.timeout(5):
            await both.wait()
        return found

    monkeypatch.setattr(Quotas, "_count", count_together)
    attempts = (
        served.services.quotas.admit_deployment(f"d{number}", workspace=workspace)
        for number, served in enumerate((app, other))
    )
    assert await num_granted(*attempts) == 2


async def test_an_owner_limits_a_workspace_within_what_the_operator_allows(
    app: Application,
) -> None:
    owner, bound = (
        await owner_key(app),
        await create_api_key(app, "bound", "admin", workspace="w", organisation="left"),
    )
    await limit(app, runs_per_day=5)

    async def set_limits(api_key: str, **limits: object) -> httpx.Response:
        body = {"limits": limits}
        return await ask(app, "POST", "/api/v1/workspaces/w/quotas", api_key, json=body)

    async def shown(name: str) -> Mapping[str, Any]:
        answer = await ask(app, "GET", "/api/v1/workspaces/w/quotas", owner)
        found: list[Mapping[str, Any]] = answer.json()["quotas"]
        return next(o for o in found if (o["holder"], o["name"]) == ("workspace", name))

    refused = await set_limits(owner, runs_per_day=6)
    assert refused.status_code == 400
    assert "may be at most 5, which the operator allows" in refused.text
    assert (await set_limits(owner, samples_in_flight=1)).status_code == 400
    assert (await set_limits(bound, runs_per_day=1)).status_code == 403
    assert (await set_limits(owner, runs_per_day=2)).status_code == 200
    assert (await shown("runs_per_day"))["most"] == 2
    assert (await shown("runs_per_day"))["is_owners"]
    path = "/api/v1/organisations/left/quotas"
    own = await ask(app, "POST", path, owner, json={"limits": {"runs_per_day": 50}})
    assert own.status_code == 403, "an organisation does not raise its own limits"
    left = (await app.get("/organisations/left"))["workspaces"][0]["id"]
    operators = {"limits": {"runs_per_day": 1, "runs_at_once": 3}}
    assert (await app.post(f"/workspaces/{left}/quotas", operators)).status_code == 200
    assert (await shown("runs_per_day"))["most"] == 1, "the lower one counts"
    assert (await set_limits(owner, runs_at_once=4)).status_code == 400
    assert (await set_limits(owner, runs_per_day="default", runs_at_once=2)).status_code == 200
    assert (await shown("runs_at_once"))["most"] == 2
    assert (await send_whole(app, owner, "numbers")).status_code == 200
    body = {"config": config()}
    assert (await set_limits(owner, runs_at_once=0)).status_code == 200
    answer = await ask(app, "POST", "/api/v1/runs", owner, json=body)
    assert answer.status_code == 429
    assert "an owner set it to 0" in answer.text
    assert "an owner of the organisation may raise it" in answer.text


async def test_limits_and_use_of_another_organisation_are_absent(app: Application) -> None:
    left, right = await owner_key(app), await owner_key(app, "right")
    bound = await create_api_key(app, "bound", "admin", workspace="w", organisation="left")
    await limit(app, members=7)
    for path in ("/api/v1/organisations/left/quotas", "/api/v1/organisations/left"):
        own = await ask(app, "GET", path, left)
        [members] = [one for one in own.json()["quotas"] if one["name"] == "members"]
        assert (members["most"], members["used"]) == (7, 0)
        assert (await ask(app, "GET", path, right)).status_code == 404
    path = "/api/v1/organisations/left"
    assert "quotas" not in (await ask(app, "GET", path, bound)).json()
    assert (await ask(app, "GET", f"{path}/quotas", bound)).status_code == 403
    for limits in ({"runs": 1}, {"members": -1}, {"samples_in_flight": 1}):
        refused = await app.post("/organisations/left/quotas", {"limits": limits})
        assert refused.status_code == 400, refused.text


async def test_a_setting_is_the_limit_of_each_organisation(app: Application) -> None:
    object.__setattr__(app.services.settings, "organisation_quotas", {"workspaces": 1})
    for name in ("quotas", "organisations", "workspaces"):
        app.services.__dict__.pop(name, None)
    body = {"url": "https://host/left/r0.git", "organisation": "left"}
    refusal(await app.post("/workspaces", body), "workspaces", 1, 1)
    await limit(app, workspaces="unlimited")
    assert (await app.post("/workspaces", body)).status_code == 201
