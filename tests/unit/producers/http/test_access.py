"""API keys and the audit list through the API: who may make which API key, how soon a revocation takes
effect, which events name whom, and what the audit list shows."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from infra.identity.api_keys import ApiKeys
from infra.identity.audit import FLUSH_S, record_access
from infra.spine.postgres.pool import connect
from schemas.events import RunRequested
from schemas.ids import dataset_stream, run_stream
from tests.kit.application import API_KEY, Application, rows
from tests.kit.history import ended_run
from tests.kit.story import beginning
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres


async def audit(app: Application, **parameters: str) -> list[Any]:
    found: list[Any] = (await app.get("/audit", **parameters))["audit"]
    return found


async def api_key_row(app: Application, name: str) -> Any:
    return await app.database.durable.fetchrow("select * from api_keys where name = $1", name)


async def rotate(app: Application, name: str, api_key: str = API_KEY, **body: object) -> Any:
    path = f"/api/v1/api-keys/{name}/rotate"
    answer = await ask(app, "POST", path, api_key, json=body)
    return answer.json() | {"status": answer.status_code}


async def status_of(app: Application, text: str) -> int:
    return (await ask(app, "GET", "/api/v1/runs", text)).status_code


async def test_an_api_key_expires_after_a_year_unless_something_else_is_said(
    app: Application,
) -> None:
    for name, body, days in (("a", {}, 365), ("b", {"expires_s": 86_400}, 1)):
        await create_api_key(app, name, "read", **body)
        left = (await api_key_row(app, name))["expires_at"] - datetime.now(UTC)
        assert timedelta(days=days - 0.01) < left <= timedelta(days=days)
    await create_api_key(app, "c", "read", expires_s="never")
    assert (await api_key_row(app, "c"))["expires_at"] is None


async def test_an_expired_api_key_is_told_so_and_a_rotation_makes_it_valid_again(
    app: Application,
) -> None:
    text = await create_api_key(app, "ci", "read", "inference")
    past = datetime.now(UTC) - timedelta(days=1)
    await app.database.durable.execute("update api_keys set expires_at = $1", past)
    app.services.recent_api_keys.forget()
    for path in ("/api/v1/runs", "/v1/models"):
        answer = await ask(app, "GET", path, text)
        assert answer.status_code == 401
        assert f"expired at {past:%Y-%m-%d %H:%M} UTC" in answer.text
        assert "`headrace key rotate ci`" in answer.text
    rotated = await rotate(app, "ci", expires_s=3600)
    assert await status_of(app, rotated["secret"]) == 200
    assert await status_of(app, text) == 401, "a rotation does not make the old secret valid"


async def test_a_rotation_replaces_the_secret_and_the_old_one_is_valid_for_an_hour(
    app: Application,
) -> None:
    old = await create_api_key(app, "ci", "read", expires_s=7 * 86_400)
    before = await api_key_row(app, "ci")
    answer = await rotate(app, "ci")
    new, after = answer["secret"], await api_key_row(app, "ci")
    assert new != old
    assert after["id"] == before["id"] == new.split("_")[1]
    assert [await status_of(app, text) for text in (old, new)] == [200, 200]
    assert new not in str(dict(after))
    left = after["old_until"] - datetime.now(UTC)
    assert timedelta(minutes=59) < left <= timedelta(hours=1)
    assert after["expires_at"] - after["rotated_at"] > timedelta(days=6.99), "as long as before"
    await app.database.durable.execute("update api_keys set old_until = now()")
    app.services.recent_api_keys.forget()
    refused = await ask(app, "GET", "/api/v1/runs", old)
    assert refused.status_code == 401
    assert "use the new secret" in refused.text
    assert await status_of(app, new) == 200
    third = (await rotate(app, "ci", overlap_s=0))["secret"]
    assert [await status_of(app, text) for text in (old, new, third)] == [401, 401, 200]
    assert {one["route"] for one in await audit(app)} >= {"/api-keys/{ref}/rotate"}


async def test_a_rotation_keeps_an_api_key_that_never_expires_as_it_is(app: Application) -> None:
    await create_api_key(app, "forever", "read", expires_s="never")
    rotated = await rotate(app, "forever")
    assert (await api_key_row(app, "forever"))["expires_at"] is None
    assert await status_of(app, rotated["secret"]) == 200
    mortal = await create_api_key(app, "boss", "admin", expires_s=3600)
    assert (await rotate(app, "forever", mortal))["status"] == 200
    row = await api_key_row(app, "forever")
    assert row["expires_at"] == (await api_key_row(app, "boss"))["expires_at"], (
        "no more than its own"
    )


async def test_an_old_secret_makes_nothing_that_outlives_it(app: Application) -> None:
    old = await create_api_key(app, "boss", "admin")
    new = (await rotate(app, "boss", overlap_s=600))["secret"]
    last = (await api_key_row(app, "boss"))["old_until"]
    path = "/api/v1/api-keys"
    wanted = {"name": "later", "scopes": ["admin"]}
    asked = await ask(app, "POST", path, old, json=wanted | {"expires_s": 3600})
    assert asked.status_code == 403
    assert (await ask(app, "POST", path, old, json=wanted)).status_code == 201
    assert (await api_key_row(app, "later"))["expires_at"] == last
    assert (await rotate(app, "later", old))["status"] == 200
    assert (await api_key_row(app, "later"))["expires_at"] == last
    refused = await ask(app, "POST", f"{path}/boss/rotate", old, json={})
    assert refused.status_code == 403
    assert "rotate it with the new one" in refused.text
    assert (await rotate(app, "boss", new))["status"] == 200


async def test_another_process_knows_of_a_rotation(app: Application) -> None:
    old = await create_api_key(app, "ci", "read")
    assert await status_of(app, old) == 200
    async with connect(app.database.url) as database:
        api_keys = ApiKeys(database)
        found = await api_keys.find("ci", workspace=None)
        _, issued = await api_keys.rotate(found, overlap_s=0, expires_at=None)
        async with asyncio.timeout(30):
            while (await status_of(app, old), await status_of(app, issued.text)) != (401, 200):
                await asyncio.sleep(0.1)


async def test_nobody_rotates_an_api_key_to_more_rights_than_their_own(app: Application) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    await create_api_key(app, "free", "read")
    await create_api_key(app, "other", "read", workspace="w", owner="bob")
    await create_api_key(app, "own", "read", workspace="w", owner="ada", expires_s=60)
    bound = await create_api_key(app, "bound", "admin", workspace="w", owner="ada", expires_s=600)
    weak = await create_api_key(app, "weak", "control")
    answers = [await rotate(app, name, bound) for name in ("free", "other", "own")]
    assert [answer["status"] for answer in answers] == [404, 403, 200]
    assert (await rotate(app, "own", bound, expires_s=3600))["status"] == 403
    assert (await rotate(app, "own", weak))["status"] == 403
    assert (await app.api.delete("/api/v1/api-keys/free")).status_code == 200
    assert (await rotate(app, "free"))["status"] == 409


async def test_the_old_paths_answer_with_the_old_names(app: Application) -> None:
    made = (await app.post("/tokens", {"name": "ci", "scopes": ["read"]})).json()
    assert made["token"]["name"] == "ci"
    assert (await ask(app, "GET", "/api/v1/runs", made["secret"])).status_code == 200
    rotated = (await app.post("/tokens/ci/rotate", {})).json()
    assert rotated["token"]["id"] == made["token"]["id"]
    assert (await app.get("/tokens"))["tokens"] == (await app.get("/api-keys"))["api_keys"]
    assert (await app.api.delete("/api/v1/tokens/ci")).json()["name"] == "ci"
    assert {one["owner"] for one in (await app.get("/audit", token="admin"))["audit"]} == {"admin"}


async def test_the_text_of_an_api_key_is_shown_once_and_stored_as_a_hash(app: Application) -> None:
    made = await app.post("/api-keys", {"name": "ci", "scopes": ["submit"], "owner": "ada"})
    text, api_key = made.json()["secret"], made.json()["api_key"]
    assert text.startswith(f"{api_key['prefix']}_")
    listed = await app.api.get("/api/v1/api-keys")
    assert api_key["prefix"] in listed.text
    assert text not in listed.text
    stored = await app.database.durable.fetchval("select api_keys::text from api_keys")
    assert text not in stored
    assert text.rpartition("_")[2] not in stored
    assert (await ask(app, "GET", "/api/v1/runs", text)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "t", "scopes": ["everything"]}, 400),
        ({"name": "t", "scopes": []}, 400),
        ({"name": "t", "scopes": "read"}, 400),
        ({"name": "a b"}, 400),
        ({"name": "t", "owner": "a@b"}, 400),
        ({"name": "t", "expires_s": 0}, 400),
        ({"name": "t", "expires_s": "soon"}, 400),
        ({"name": "t", "workspace": "nothing"}, 404),
        ({"name": "t", "scopes": ["metrics"], "workspace": "w"}, 400),
        ({"name": "t", "scopes": ["read", "inference"], "workspace": "w", "expires_s": 60}, 201),
    ],
)
async def test_an_api_key_is_checked(app: Application, body: object, status: int) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    assert (await app.post("/api-keys", body)).status_code == status


async def test_nobody_makes_an_api_key_with_more_rights_than_their_own(app: Application) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    bound = await create_api_key(app, "bound", "admin", workspace="w", owner="ada")
    brief = await create_api_key(app, "brief", "admin", expires_s=600)
    weak = await create_api_key(app, "weak", "read", "submit", "control")

    async def make(api_key: str, **body: object) -> int:
        answer = await ask(app, "POST", "/api/v1/api-keys", api_key, json={"name": "new", **body})
        return answer.status_code

    assert await make(weak) == 403
    assert await make(bound, owner="admin") == 403
    assert await make(bound, scopes=["admin"], name="own") == 201
    made = (await app.get("/api-keys"))["api_keys"][0]
    assert (made["name"], made["owner"]) == ("own", "ada")
    assert made["workspace"] is not None
    assert await make(brief, expires_s="never") == 403
    assert await make(brief, expires_s=3600) == 403
    assert await make(brief, expires_s=60) == 201
    assert await make(brief, name="usual") == 201
    usual, short = await api_key_row(app, "usual"), await api_key_row(app, "brief")
    assert usual["expires_at"] == short["expires_at"]


async def test_a_name_is_in_use_until_its_api_key_is_revoked(app: Application) -> None:
    await create_api_key(app, "ci", "read")
    assert (await app.post("/api-keys", {"name": "ci"})).status_code == 409
    assert (await app.api.delete("/api/v1/api-keys/ci")).status_code == 200
    await create_api_key(app, "ci", "read")
    assert (await app.api.delete("/api/v1/api-keys/absent")).status_code == 404


async def test_a_name_that_several_api_keys_have_is_refused_with_their_ids(
    app: Application,
) -> None:
    await app.post("/workspaces", {"url": "/repo", "name": "w"})
    await create_api_key(app, "ci", "read")
    await create_api_key(app, "ci", "read", workspace="w")
    ids = [one["id"] for one in (await app.get("/api-keys"))["api_keys"] if one["name"] == "ci"]
    refused = await app.api.delete("/api/v1/api-keys/ci")
    assert refused.status_code == 409
    assert all(text in refused.text for text in (*ids, "headrace key list"))
    assert (await app.post("/api-keys/ci/rotate", {})).status_code == 409
    assert (await app.api.delete(f"/api/v1/api-keys/{ids[0]}")).status_code == 200


async def test_another_process_knows_of_a_revocation_within_five_seconds(app: Application) -> None:
    text = await create_api_key(app, "ci", "read")
    async with connect(app.database.url) as database:
        assert (await ask(app, "GET", "/api/v1/runs", text)).status_code == 200
        await ApiKeys(database).revoke("ci", workspace=None)
        async with asyncio.timeout(30):
            while (await ask(app, "GET", "/api/v1/runs", text)).status_code != 401:
                await asyncio.sleep(0.1)


async def test_a_stream_of_events_ends_when_its_api_key_is_revoked(app: Application) -> None:
    await app.append([next(beginning("r1", "first", steps=3))])
    text = await create_api_key(app, "ci", "read")
    await app.services.recent_api_keys.find(text)

    async def follow() -> str:
        headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {text}"}
        return (await app.api.get("/api/v1/runs/r1/events", headers=headers)).text

    stream = asyncio.ensure_future(follow())
    await asyncio.sleep(0.2)
    assert not stream.done()
    await app.api.delete("/api/v1/api-keys/ci")
    assert "rl.run.requested" in await asyncio.wait_for(stream, 30)


async def test_each_event_of_a_request_names_its_actor(app: Application) -> None:
    text = await create_api_key(app, "ci", "submit", "control", owner="ada")
    identity = text.split("_")[1]
    made = await ask(
        app, "POST", "/api/v1/datasets", text, json={"name": "d", "file_name": "r.jsonl"}
    )
    sent = await ask(app, "PUT", made.json()["upload"]["path"], text, content=rows(4))
    assert sent.status_code == 200
    stream = dataset_stream(made.json()["dataset"]["id"])
    [recorded] = (await app.services.log.load({stream: 0}))[stream]
    assert recorded.actor == f"ada/{identity}@127.0.0.1"
    await ended_run(app)
    stream = run_stream("r1")
    events = (await app.services.log.load({stream: 0}))[stream]
    assert {event.actor for event in events} == {None}
    for verb, kind in (("archive", "rl.run.archived"), ("restore", "rl.run.restored")):
        answer = await ask(app, "POST", f"/api/v1/runs/r1/{verb}", text, json={})
        assert answer.status_code == 200, answer.text
        events = (await app.services.log.load({stream: 0}))[stream]
        [notice] = [event for event in events if event.type == kind]
        assert notice.actor == f"ada/{identity}@127.0.0.1"
    page = await app.get("/runs/r1/events", types="rl.run.restored")
    assert page["events"][0]["actor"] == f"ada/{identity}@127.0.0.1"


async def test_an_archive_keeps_the_actors(app: Application) -> None:
    await ended_run(app)
    answer = await app.post("/runs/r1/rename", {"name": "renamed"})
    assert answer.status_code == 200
    for verb in ("archive", "restore"):
        assert (await app.post(f"/runs/r1/{verb}", {})).status_code == 200
    stream = run_stream("r1")
    events = (await app.services.log.load({stream: 0}))[stream]
    actors = {event.type: event.actor for event in events}
    assert actors["rl.run.renamed"] == "admin/root@127.0.0.1"
    assert actors[RunRequested.type] is None


async def test_the_audit_list_shows_what_was_allowed_and_refused(app: Application) -> None:
    text = await create_api_key(app, "ci", "read", owner="ada")
    assert (await ask(app, "POST", "/api/v1/gc", text)).status_code == 403
    for _ in range(3):
        await ask(app, "GET", "/api/v1/runs", text)
        await ask(app, "GET", "/api/v1/runs", "not a key")
    found = await audit(app)
    shown = {(one["owner"], one["method"], one["route"], one["status"]): one for one in found}
    assert shown["admin", "POST", "/api-keys", 201]["allowed"]
    assert not shown["ada", "POST", "/gc", 403]["allowed"]
    assert shown["ada", "GET", "/runs", 200]["count"] == 3
    refused = shown[None, "GET", "", 401]
    assert (refused["count"], refused["subject"]) == (3, "/api/v1/runs")
    assert refused["address"] == "127.0.0.1"
    assert {one["owner"] for one in await audit(app, api_key="ada")} == {"ada"}
    assert await audit(app, since="2100-01-01") == []
    assert (await app.api.get("/api/v1/audit?since=x")).status_code == 400
    assert API_KEY not in str(found)


async def test_audit_entries_are_bounded(app: Application) -> None:
    for _ in range(4):
        await app.post("/gc", {})
        await app.api.get("/api/v1/nothing", headers={"Authorization": ""})
        await app.services.audit.flush(everything=True)
    await app.services.audit.trim(changes=3, others=2)
    found = await app.database.durable.fetch("select method, status from audit order by id")
    assert [(row["method"], row["status"]) for row in found].count(("POST", 200)) == 3
    assert [row["status"] for row in found].count(401) == 2


async def test_audit_entries_and_last_uses_are_written_without_being_asked(
    app: Application,
) -> None:
    core = app.services
    text = await create_api_key(app, "ci", "read")
    await ask(app, "GET", "/api/v1/runs", text)
    writing = asyncio.ensure_future(
        record_access(core.audit, core.recent_api_keys, core.api_keys, core.clock)
    )
    async with asyncio.timeout(FLUSH_S * 20):
        while not await app.database.durable.fetchval(
            "select last_used_at is not null and exists (select from audit where status = 201) "
            "from api_keys"
        ):
            await asyncio.sleep(0.02)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    count = await app.database.durable.fetchval("select count(*) from audit where method = 'GET'")
    assert count == 1, "the counts are written when the process ends"
