"""Versioned artifacts over HTTP: published once, found, listed, downloaded and withdrawn."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.application import Application, application
from tests.kit.artifacts import announce, named, packed, push, send_parts, signed, task_archive

pytestmark = pytest.mark.postgres


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home", confines_checks=True) as served:
        yield served


async def test_a_version_is_published_and_downloaded(app: Application) -> None:
    data = task_archive(solve="echo flag\n")
    made = await push(app, named(), data)
    assert made.status_code == 201, made.text
    shown = made.json()["artifact"]
    assert shown["sha256"] == hashlib.sha256(data).hexdigest()
    assert (shown["num_files"], shown["size"]) == (2, len(data))
    for ref in ("flags", "flags@latest", "flags@1.0.0"):
        found = (await app.get(f"/artifacts/task/{ref}"))["artifact"]
        assert {key: found[key] for key in shown} == shown
        assert found["manifest"]["instruction"] == "Find the flag."
        assert [one["path"] for one in found["files"]] == ["solve", "task.yaml"]
    link = await app.get("/artifacts/task/flags/url")
    got = await signed(app, "GET", link["url"])
    assert got.content == data
    assert link["file_name"] == "flags-1.0.0.tar.gz"
    assert (await app.get("/artifacts"))["artifacts"][0]["id"] == shown["id"]


async def test_the_same_archive_again_is_the_same_version(app: Application) -> None:
    data = task_archive()
    first = (await push(app, named(), data)).json()["artifact"]
    again = await push(app, named(), data)
    assert again.status_code == 200
    assert again.json() == {"artifact": first, "upload": None}


async def test_a_version_that_is_published_again_is_answered_once_lists_have_it(
    app: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that died after the event was appended left lists without it, which answered 404."""
    data = task_archive()
    await push(app, named(), data)
    waited: list[object] = []

    async def catch_up(cursor: object, **_: float) -> bool:
        waited.append(cursor)
        return True

    monkeypatch.setattr(app.services.readmodel, "caught_up", catch_up)
    await push(app, named(), data)
    head = await app.services.log.visible_head()
    assert waited == [head]


async def test_other_content_of_a_version_is_refused(app: Application) -> None:
    await push(app, named(), task_archive())
    other = await push(app, named(), task_archive(more="x"))
    assert other.status_code == 409
    assert "so raise the version" in other.json()["detail"]


async def test_two_contents_at_once_make_one_version(app: Application) -> None:
    datas = [task_archive(note=str(number)) for number in range(2)]
    plans = []
    for data in datas:
        plan = (await announce(app, named(), data)).json()["upload"]
        await send_parts(app, plan, data)
        plans.append(plan)
    posts = (app.post("/artifacts", {**named(), "upload": plan["id"]}) for plan in plans)
    answers = await asyncio.gather(*posts)
    assert sorted(one.status_code for one in answers) == [201, 409]
    [winner] = [one.json()["artifact"] for one in answers if one.status_code == 201]
    assert (await app.get("/artifacts/task/flags"))["artifact"]["sha256"] == winner["sha256"]


async def test_versions_are_listed_by_precedence_and_latest_is_a_release(app: Application) -> None:
    for version in ("1.9.0", "1.10.0", "2.0.0-rc.1", "1.2.0"):
        made = await push(app, named(version), task_archive(version))
        assert made.status_code == 201, made.text
    listed = (await app.get("/artifacts/task/flags/versions"))["versions"]
    assert [one["version"] for one in listed] == ["2.0.0-rc.1", "1.10.0", "1.9.0", "1.2.0"]
    [latest] = (await app.get("/artifacts", kind="task"))["artifacts"]
    assert (latest["version"], latest["num_versions"]) == ("1.10.0", 4)
    assert (await app.get("/artifacts/task/flags"))["artifact"]["version"] == "1.10.0"


async def test_a_list_is_searched_sorted_and_paged(app: Application) -> None:
    for name in ("b-sql", "a-sql", "c_net"):
        await push(app, named(name=name), task_archive(name=name))
    page = await app.get("/artifacts", search="-sql", sort="name", ascending="true", limit=1)
    assert [one["name"] for one in page["artifacts"]] == ["a-sql"]
    assert (page["total_count"], page["next_offset"]) == (2, 1)
    assert (await app.get("/artifacts", search="_"))["total_count"] == 1
    assert (await app.get("/artifacts", kind="model"))["total_count"] == 0
    wrong = await app.api.get("/api/v1/artifacts", params={"sort": "size"})
    assert wrong.json()["issues"][0]["key"] == "sort"


async def test_an_archive_that_is_not_a_task_is_refused_with_its_issues(app: Application) -> None:
    data = packed({"task.yaml": "name: flags\nversion: 1.0.1\ninstruction: x\n"})
    refused = await push(app, named(), data)
    assert refused.status_code == 400
    issues = {one["key"]: one["message"] for one in refused.json()["issues"]}
    assert issues["task.yaml: verification"] == "is missing; add it"
    assert "'1.0.0' is published" in issues["task.yaml: version"]
    assert (await app.get("/artifacts"))["total_count"] == 0


async def test_bytes_other_than_the_announced_ones_are_refused(app: Application) -> None:
    data = task_archive()
    plan = (await announce(app, named(), data)).json()["upload"]
    await send_parts(app, plan, data[:-1] + b"?")
    refused = await app.post("/artifacts", {**named(), "upload": plan["id"]})
    assert refused.status_code == 400
    assert refused.json()["issues"][0]["key"] == "sha256"


async def test_an_upload_of_one_version_does_not_publish_another(app: Application) -> None:
    data = task_archive()
    plan = (await announce(app, named(), data)).json()["upload"]
    await send_parts(app, plan, data)
    refused = await app.post("/artifacts", {**named("1.0.1"), "upload": plan["id"]})
    assert refused.status_code == 404


async def test_a_publication_whose_answer_was_lost_is_answered_again(app: Application) -> None:
    data = task_archive()
    plan = (await announce(app, named(), data)).json()["upload"]
    await send_parts(app, plan, data)
    bodies = [await app.post("/artifacts", {**named(), "upload": plan["id"]}) for _ in range(2)]
    assert bodies[0].status_code == bodies[1].status_code == 201
    assert bodies[0].json() == bodies[1].json()


async def test_an_interrupted_upload_goes_on(app: Application) -> None:
    data = task_archive()
    first = (await announce(app, named(), data)).json()["upload"]
    await send_parts(app, first, data)
    again = (await announce(app, named(), data)).json()["upload"]
    assert again["id"] == first["id"]
    assert again["parts"][0]["etag"]


@pytest.mark.parametrize(
    "body",
    [
        named("1.0"),
        named("01.0.0"),
        named("1.0.0+build"),
        named(name="Flags"),
        named(name="a..b"),
        named(name="../x"),
        named(name="é"),
        named(name="x" * 300),
        named(name="0123456789abcdef"),
        named(kind="dataset"),
    ],
    ids=lambda body: "/".join(body.values())[:30],
)
async def test_a_bad_kind_name_or_version_is_refused(
    app: Application, body: dict[str, str]
) -> None:
    refused = await announce(app, body, task_archive())
    assert refused.status_code == 400
    assert refused.json()["issues"]


async def test_an_unknown_version_names_the_known_ones(app: Application) -> None:
    await push(app, named(), task_archive())
    for path, said in (
        ("task/flags@2.0.0", "it has 1.0.0"),
        ("task/other", "headrace artifact push task"),
        ("model/flags", "headrace artifact push model"),
    ):
        missing = await app.api.get(f"/api/v1/artifacts/{path}")
        assert missing.status_code == 404
        assert said in missing.json()["detail"]


async def test_a_withdrawn_version_can_only_be_published_as_it_was(app: Application) -> None:
    data = task_archive()
    first = (await push(app, named(), data)).json()["artifact"]
    unnamed = await app.api.delete("/api/v1/artifacts/task/flags")
    assert unnamed.status_code == 400
    gone = await app.api.delete("/api/v1/artifacts/task/flags@1.0.0")
    assert gone.json()["artifact"]["id"] == first["id"]
    assert (await app.get("/artifacts"))["total_count"] == 0
    assert (await app.api.get("/api/v1/artifacts/task/flags@1.0.0")).status_code == 404
    other = await push(app, named(), task_archive(more="x"))
    assert other.status_code == 409
    assert "published and withdrawn" in other.json()["detail"]
    again = await push(app, named(), data)
    assert again.status_code == 201, again.text
    assert (await app.get("/artifacts/task/flags@1.0.0"))["artifact"]["sha256"] == first["sha256"]
