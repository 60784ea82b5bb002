"""Artifacts of two organisations with the same names, roles, what uses a version, and its bytes."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra import failpoints
from infra.blobs import garbage
from infra.blobs.installed import InstalledBlobs
from infra.ports import actor as actors
from producers.core.registry import publishing
from schemas.artifact_refs import ArtifactRef
from schemas.events import ArtifactPublished, DatasetRegistered
from schemas.specs import DatasetRef
from tests.kit.application import Application, application
from tests.kit.artifacts import announce, named, push, signed, task_archive
from tests.kit.people import SignedUp, member
from tests.kit.tenants import ask

pytestmark = pytest.mark.postgres

VERSION = "/api/v1/artifacts/task/flags@1.0.0"
LATER = timedelta(hours=26)


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home") as served:
        for name in ("left", "right"):
            made = await served.post("/organisations", {"name": name, "title": name})
            assert made.status_code == 201, made.text
        yield served


async def person(app: Application, role: Any, organisation: str = "left") -> SignedUp:
    found = await app.services.organisations.find(organisation)
    return await member(app, f"{organisation}-{role}", role, organisation=found.id)


async def test_equal_names_of_two_organisations_have_their_own_content(app: Application) -> None:
    ours, theirs = await person(app, "member"), await person(app, "member", "right")
    datas = {one.api_key: task_archive(note=one.id) for one in (ours, theirs)}
    for api_key, data in datas.items():
        made = await push(app, named(), data, api_key=api_key)
        assert made.status_code == 201, made.text
    for api_key, data in datas.items():
        listed = (await ask(app, "GET", "/api/v1/artifacts", api_key)).json()
        assert listed["total_count"] == 1
        link = (await ask(app, "GET", f"{VERSION}/url", api_key)).json()
        assert (await signed(app, "GET", link["url"])).content == data
    for query in ("?organisation=right", "?organisation=nothing"):
        hidden = await ask(app, "GET", f"{VERSION}{query}", ours.api_key)
        assert hidden.status_code == 404
        hidden = await ask(app, "GET", f"/api/v1/artifacts{query}", ours.api_key)
        assert hidden.status_code == 404
    operator = await app.get("/artifacts/task/flags@1.0.0", organisation="right")
    assert operator["artifact"]["published_by"].startswith(theirs.id)


async def test_an_upload_of_another_organisation_publishes_nothing(app: Application) -> None:
    ours, theirs = await person(app, "member"), await person(app, "member", "right")
    data = task_archive()
    plan = (await announce(app, named(), data, api_key=theirs.api_key)).json()["upload"]
    body = {**named(), "upload": plan["id"]}
    refused = await ask(app, "POST", "/api/v1/artifacts", ours.api_key, json=body)
    assert refused.status_code == 404
    elsewhere = {**named(), "organisation": "right"}
    assert (await announce(app, elsewhere, data, api_key=ours.api_key)).status_code == 404


async def test_viewers_read_members_publish_and_owners_withdraw(app: Application) -> None:
    viewer, author, owner = [await person(app, role) for role in ("viewer", "member", "owner")]
    assert (await announce(app, named(), b"x", api_key=viewer.api_key)).status_code == 403
    made = await push(app, named(), task_archive(), api_key=author.api_key)
    assert made.status_code == 201, made.text
    assert (await ask(app, "GET", VERSION, viewer.api_key)).status_code == 200
    for one in (viewer, author):
        assert (await ask(app, "DELETE", VERSION, one.api_key)).status_code == 403
    assert (await ask(app, "DELETE", VERSION, owner.api_key)).status_code == 200


async def test_a_signed_url_ends_with_the_right_to_see_the_version(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await person(app, "member"), await person(app, "member", "right")
    await push(app, named(), task_archive(), api_key=theirs.api_key)
    link = (await ask(app, "GET", f"{VERSION}/url", theirs.api_key)).json()["url"]
    [row] = (await ask(app, "GET", "/api/v1/artifacts", theirs.api_key)).json()["artifacts"]
    await push(app, named(), task_archive(note="ours"), api_key=ours.api_key)
    own = (await ask(app, "GET", f"{VERSION}/url", ours.api_key)).json()["url"]
    [ours_row] = (await ask(app, "GET", "/api/v1/artifacts", ours.api_key)).json()["artifacts"]
    changed = own.replace(ours_row["id"], row["id"])
    assert (await signed(app, "GET", changed)).status_code in (400, 401, 403)
    assert (await signed(app, "GET", link)).status_code == 200


async def test_archives_count_against_the_quota_until_they_are_withdrawn(app: Application) -> None:
    author, owner = await person(app, "member"), await person(app, "owner")
    data = task_archive()

    async def used() -> int:
        found = await app.get("/organisations/left/quotas")
        return int(next(q["used"] for q in found["quotas"] if q["name"] == "stored_bytes"))

    await push(app, named(), data, api_key=author.api_key)
    assert await used() == len(data)
    await ask(app, "DELETE", VERSION, owner.api_key)
    assert await used() == 0


async def _event(app: Application) -> ArtifactPublished:
    key = publishing.artifact_key("main", "task", "flags", "1.0.0")
    found = await app.services.artifact_registry.find_id(key.id)
    assert found is not None
    return found


async def _collect(app: Application) -> int:
    services = app.services
    assert isinstance(services.blobs, InstalledBlobs)
    await app.database.durable.execute("update discarded_blobs set at = at - interval '1 day'")
    return await garbage.collect(
        services.database, services.blobs, now=services.clock.now() + LATER
    )


def _frozen(content: ArtifactRef) -> DatasetRegistered:
    """An event of something else that keeps these bytes."""
    ref = DatasetRef(dataset="snapshot", name="snapshot", content=content, num_rows=1)
    return DatasetRegistered(
        dataset=ref, columns=("a",), file_name="a", file_size=1, original=content
    )


async def test_the_bytes_of_a_version_stay_and_those_of_a_withdrawn_one_go(
    app: Application,
) -> None:
    await push(app, named(), task_archive())
    event = await _event(app)
    keys = [ref.uri.rpartition("registry/")[2] for ref in (event.content, event.detail)]
    assert await _collect(app) == 0
    for key in keys:
        assert await app.services.blobs.exists(f"registry/{key}")
    gone = await app.api.delete(VERSION)
    assert gone.status_code == 200, gone.text
    assert await _collect(app) == 2
    for key in keys:
        assert await app.services.blobs.exists(f"registry/{key}") is None


async def test_a_version_that_something_uses_is_not_withdrawn(app: Application) -> None:
    await push(app, named(), task_archive())
    event = await _event(app)
    await app.services.log.append([_frozen(event.content)], cause=uuid4())
    refused = await app.api.delete(VERSION)
    assert refused.status_code == 409
    assert "still used by dataset-snapshot" in refused.json()["detail"]
    assert (await app.api.get(VERSION)).status_code == 200


async def test_a_use_that_began_just_before_a_withdrawal_keeps_the_bytes(app: Application) -> None:
    await push(app, named(), task_archive())
    event = await _event(app)
    assert (await app.api.delete(VERSION)).status_code == 200
    await app.services.log.append([_frozen(event.content)], cause=uuid4())
    assert await _collect(app) == 1, "the list of files alone"
    key = event.content.uri.rpartition("registry/")[2]
    assert await app.services.blobs.exists(f"registry/{key}")


async def test_bytes_of_a_publication_that_never_ended_are_collected(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(point: str) -> None:
        if point == "artifact.stored":
            raise RuntimeError("the process ends here")

    monkeypatch.setattr(failpoints, "hit", die)
    assert (await push(app, named(), task_archive())).status_code == 500
    assert len(await app.services.blobs.keys("registry/")) == 2
    assert await _collect(app) == 2
    assert await app.services.blobs.keys("registry/") == []


async def test_the_twin_without_the_mark_these_bytes_stay(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unmarked(self: InstalledBlobs, key: str) -> None:
        return None

    def die(point: str) -> None:
        if point == "artifact.stored":
            raise RuntimeError("the process ends here")

    monkeypatch.setattr(InstalledBlobs, "mark_unnamed", unmarked)
    monkeypatch.setattr(failpoints, "hit", die)
    await push(app, named(), task_archive())
    assert await _collect(app) == 0
    assert len(await app.services.blobs.keys("registry/")) == 2


async def test_the_twin_without_the_filter_another_organisation_is_seen(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await person(app, "member"), await person(app, "member", "right")
    await push(app, named(), task_archive(), api_key=theirs.api_key)
    assert (await ask(app, "GET", VERSION, ours.api_key)).status_code == 404
    right = (await app.services.organisations.find("right")).id
    monkeypatch.setattr("producers.http.routes.artifacts.own_organisation", lambda: right)
    assert (await ask(app, "GET", VERSION, ours.api_key)).status_code == 200
    assert actors.own_organisation() == "main"


async def test_a_rebuild_lists_the_same_versions(app: Application) -> None:
    for version in ("1.0.0", "1.1.0", "1.2.0"):
        await push(app, named(version), task_archive(version))
    await app.api.delete("/api/v1/artifacts/task/flags@1.1.0")
    before = await app.get("/artifacts/task/flags/versions")
    rebuilt = await app.post("/rebuild", {})
    assert rebuilt.status_code in (200, 202), rebuilt.text
    await app.services.readmodel.caught_up(await app.services.log.visible_head())
    assert await app.get("/artifacts/task/flags/versions") == before
