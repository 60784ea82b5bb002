"""Connecting a workspace to its forge over HTTP: the webhook, its secret, and what is recorded."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from infra.repositories.git.credentials import TokenCredential
from producers.core import connecting
from producers.core.connecting import Connecting
from schemas.events import (
    RefsCheckRequested,
    RefsListed,
    WorkspaceConnected,
    WorkspaceDisconnected,
)
from schemas.ids import short_id
from tests.kit.application import API_KEY, Application, application
from tests.kit.forge_server import TOKEN, FakeForge, FakeGitea, Reply, serving

pytestmark = pytest.mark.postgres

WORKSPACE = short_id("workspace", "repo")
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nhush-key\n-----END OPENSSH PRIVATE KEY-----"


@pytest.fixture
def forge() -> Iterator[FakeForge]:
    with serving(FakeGitea()) as server:
        yield server


@pytest.fixture
async def app(database_url: str, tmp_path: Path, forge: FakeForge) -> AsyncIterator[Application]:
    """The application, with sync played by a task that lists the refs at each request."""
    repositories = (forge.url, "/repo", "https://plain.example/o/r")
    async with application(database_url, tmp_path / "home", repositories=repositories) as served:
        syncing = asyncio.ensure_future(play_sync(served))
        yield served
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)


async def play_sync(app: Application) -> None:
    answered = 0
    while True:
        await asyncio.sleep(0.02)
        asked = await app.recorded(WORKSPACE, RefsCheckRequested)
        for number in range(answered + 1, len(asked) + 1):
            listed = RefsListed(workspace=WORKSPACE, round=number, digest="d")
            await app.services.log.append([listed], cause=uuid4())
        answered = len(asked)


async def connect(served: Application, forge: FakeForge, /, **body: object) -> httpx.Response:
    asked = {"url": forge.url, "forge": "gitea", "token": TOKEN, **body}
    return await served.post(
        "/workspaces/connect", {k: v for k, v in asked.items() if v is not None}
    )


async def test_connecting_makes_the_hook_after_the_refs_are_remembered(
    app: Application, forge: FakeForge
) -> None:
    answer = await connect(app, forge)
    assert answer.status_code == 201, answer.text
    found = answer.json()
    assert found["workspace"] == {"id": WORKSPACE, "name": "repo", "url": forge.url}
    hook = found["hook"]
    assert (hook["made"], hook["problem"]) == (True, None)
    assert hook["url"] == "http://127.0.0.1:8420/webhooks/repo"
    assert forge.shown_hooks() == [(hook["url"], hook["secret"])]
    events = await app.recorded(WORKSPACE, RefsCheckRequested, RefsListed, WorkspaceConnected)
    asked, listed, connected = events
    assert asked == RefsCheckRequested(workspace=WORKSPACE, reason="connected", baseline=True)
    assert isinstance(listed, RefsListed)
    [made] = forge.hooks
    assert connected == WorkspaceConnected(
        workspace=WORKSPACE, forge="gitea", hook=str(made["id"]), can_post=True
    )
    stored = await app.services.connections.get_connection(WORKSPACE)
    assert stored is not None
    assert (stored.hook, stored.secrets) == (str(made["id"]), (hook["secret"],))
    assert stored.credential == TokenCredential("git", TOKEN)


async def test_the_old_name_of_the_field_names_the_forge(
    app: Application, forge: FakeForge
) -> None:
    answer = await connect(app, forge, forge=None, provider="gitea")
    assert answer.status_code == 201, answer.text
    assert answer.json()["forge"] == answer.json()["provider"] == "gitea"


async def test_no_event_log_line_or_answer_holds_the_token(
    app: Application, forge: FakeForge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await connect(app, forge)
    secret = answer.json()["hook"]["secret"]
    rows = await app.database.durable.fetch("select data::text from events")
    for row in rows:
        assert TOKEN not in row["data"]
        assert secret not in row["data"]
    assert TOKEN not in caplog.text
    assert secret not in caplog.text
    assert TOKEN not in answer.text


async def test_connecting_again_keeps_the_secret_and_remembers_nothing(
    app: Application, forge: FakeForge
) -> None:
    first = (await connect(app, forge)).json()["hook"]
    again = await app.post("/workspaces/connect", {"url": "repo", "forge": "gitea"})
    assert again.status_code == 201, again.text
    assert again.json()["hook"] == {**first, "secret": None}
    assert forge.shown_hooks() == [(first["url"], first["secret"])]
    assert len(await app.recorded(WORKSPACE, RefsCheckRequested)) == 1


async def test_a_repeated_request_gets_the_same_answer(app: Application, forge: FakeForge) -> None:
    body = {"url": forge.url, "forge": "gitea", "token": TOKEN}
    first = await app.post("/workspaces/connect", body, idempotency_key="k")
    again = await app.post("/workspaces/connect", body, idempotency_key="k")
    assert again.json() == first.json()
    assert len(forge.hooks) == 1
    other = await app.post("/workspaces/connect", body, idempotency_key="l")
    assert other.json()["hook"]["secret"] is None


async def test_the_stored_credential_opens_the_repository_again(
    app: Application, forge: FakeForge
) -> None:
    await connect(app, forge)
    known = app.services.check_repository.__self__  # type: ignore[attr-defined]  # a method of the kit
    known.credentials.clear()
    assert (await connect(app, forge, token=None)).status_code == 201
    assert known.credentials == [TokenCredential("git", TOKEN)]


async def test_without_a_token_the_secret_is_shown_and_no_hook_is_made(
    app: Application, forge: FakeForge
) -> None:
    answer = await connect(app, forge, token=None)
    hook = answer.json()["hook"]
    assert (hook["made"], hook["problem"]) == (False, None)
    assert len(hook["secret"]) == 64
    assert forge.requests == []
    [connected] = await app.recorded(WORKSPACE, WorkspaceConnected)
    assert connected == WorkspaceConnected(workspace=WORKSPACE, forge="gitea")


async def test_a_directory_needs_no_forge(app: Application) -> None:
    answer = await app.post("/workspaces/connect", {"url": "/repo"})
    assert answer.status_code == 201, answer.text
    assert answer.json()["forge"] == "none"


@pytest.mark.parametrize("cut_at", ["_remember_refs", "_make_hook", "_append_once"])
async def test_a_connection_that_was_cut_off_is_completed_by_the_next_one(
    app: Application, forge: FakeForge, monkeypatch: pytest.MonkeyPatch, cut_at: str
) -> None:
    async def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as cut:
        cut.setattr(Connecting, cut_at, die)
        assert (await connect(app, forge)).status_code == 500
    assert await app.recorded(WORKSPACE, WorkspaceConnected) == []
    before = len(await app.recorded(WORKSPACE, RefsCheckRequested))
    answer = await connect(app, forge)
    assert answer.status_code == 201, answer.text
    assert len(answer.json()["hook"]["secret"]) == 64
    assert len(await app.recorded(WORKSPACE, RefsCheckRequested)) == before + 1
    assert (await connect(app, forge)).json()["hook"]["secret"] is None
    assert len(await app.recorded(WORKSPACE, RefsCheckRequested)) == before + 1


async def test_a_workspace_is_found_while_a_transaction_holds_the_horizon(app: Application) -> None:
    async with app.database.durable.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.fetchval(
            "select pg_current_xact_id()"
        )  # from here on it holds the horizon
        added = await app.services.workspaces.add("/repo", "held")
        assert (await app.services.workspaces.find_workspace("held")).id == added.event.run_id
        await transaction.rollback()


async def test_the_repository_is_opened_with_the_credential(
    app: Application, forge: FakeForge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.core.connecting.LISTED_S", 0.0)  # nobody lists its refs here
    known = app.services.check_repository.__self__  # type: ignore[attr-defined]  # a method of the kit
    await connect(app, forge)
    assert set(known.credentials) == {TokenCredential("git", TOKEN)}
    known.credentials.clear()
    answer = await app.post("/workspaces/connect", {"url": "/repo", "deploy_key": KEY})
    assert answer.status_code == 201, answer.text
    assert {type(one).__name__ for one in known.credentials} == {"KeyCredential"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"url": "https://plain.example/o/r"}, "cannot be told from this address"),
        ({"forge": "bitbucket"}, "must be one of github, gitea, gitlab, none"),
        ({"token": "wrong-token"}, "answers 401"),
        ({"token": "to ken"}, "is not a token"),
        ({"token": "tökən"}, "is not a token"),
        ({"token": 7}, "must be a string"),
        ({"token": "t", "deploy_key": KEY}, "give only one of them"),
        ({"token": None, "deploy_key": "hush-key"}, "is not a private key"),
        ({"token": None, "app": {"id": "1", "private_key": KEY}}, "use --token-env"),
        ({"token": None, "app": {"id": "../1", "private_key": KEY}}, "number of the GitHub App"),
        ({"token": None, "app": {"id": "1", "key": KEY}}, "has unknown fields"),
        ({"token": None, "app": "1"}, "must be an object"),
        ({"url": "/nowhere", "forge": "none", "token": None}, "is not a git repository"),
        ({"url": "nobody", "token": None}, "there is no workspace"),
        ({"url": "/repo", "name": "Bad Name"}, "cannot name"),
        ({"secret": "mine"}, "unrecognized field secret"),
    ],
)
async def test_a_wrong_request_stores_nothing(
    app: Application, forge: FakeForge, body: dict[str, object], said: str
) -> None:
    if body.get("url") == "https://plain.example/o/r":
        body = {**body, "forge": None, "token": None}
    if "name" in body:
        body = {**body, "forge": "none", "token": None}
    answer = await connect(app, forge, **body)
    assert 400 <= answer.status_code < 500, answer.text
    assert said in answer.json()["detail"]
    assert "hush" not in answer.text
    assert await app.services.connections.all_connections() == []
    assert await app.recorded(WORKSPACE, WorkspaceConnected) == []


async def test_a_forge_that_is_away_is_said(app: Application, forge: FakeForge) -> None:
    forge.planned.append(Reply(503))
    answer = await connect(app, forge)
    assert answer.status_code == 503
    assert await app.services.connections.all_connections() == []


async def test_a_hook_that_is_refused_is_made_by_hand(app: Application, forge: FakeForge) -> None:
    forge.planned += [Reply(200, {"full_name": "team/repo"}), Reply(403, {"message": "no"})]
    answer = await connect(app, forge)
    assert answer.status_code == 201, answer.text
    hook = answer.json()["hook"]
    assert hook["made"] is False
    assert "write:repository" in hook["problem"]
    assert len(hook["secret"]) == 64
    assert len(await app.services.connections.all_connections()) == 1


async def test_refs_that_are_never_listed_hold_nothing_up(
    app: Application, forge: FakeForge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "LISTED_S", 0.0)
    assert (await connect(app, forge)).status_code == 201


async def test_rotating_gives_the_hook_the_new_secret(app: Application, forge: FakeForge) -> None:
    first = (await connect(app, forge)).json()["hook"]["secret"]
    answer = await app.post("/workspaces/repo/rotate-secret", {})
    second = answer.json()["hook"]
    assert second["made"] is True
    assert forge.shown_hooks() == [(second["url"], second["secret"])]
    stored = await app.services.connections.get_connection(WORKSPACE)
    assert stored is not None
    assert stored.secrets == (second["secret"], first)
    third = (await app.post("/workspaces/repo/rotate-secret", {"now": True})).json()["hook"]
    stored = await app.services.connections.get_connection(WORKSPACE)
    assert stored is not None
    assert stored.secrets == (third["secret"],)


async def test_disconnecting_deletes_hook_and_secrets(app: Application, forge: FakeForge) -> None:
    await connect(app, forge)
    answer = await app.api.delete("/api/v1/workspaces/repo/connection")
    assert answer.status_code == 200, answer.text
    assert answer.json()["hook"] == {"deleted": True, "problem": None}
    assert forge.hooks == []
    assert await app.services.connections.all_connections() == []
    assert await app.recorded(WORKSPACE, WorkspaceDisconnected) == [
        WorkspaceDisconnected(workspace=WORKSPACE)
    ]
    for path in ("connection", "rotate-secret"):
        method = "DELETE" if path == "connection" else "POST"
        again = await app.api.request(method, f"/api/v1/workspaces/repo/{path}")
        assert again.status_code == 404
        assert "is not connected" in again.json()["detail"]


async def test_a_hook_without_an_api_is_not_deleted(app: Application) -> None:
    await app.post("/workspaces/connect", {"url": "/repo"})
    answer = await app.api.delete("/api/v1/workspaces/repo/connection")
    assert answer.json()["hook"] == {"deleted": False, "problem": None}


async def test_a_hook_that_stays_on_the_forge_is_said(app: Application, forge: FakeForge) -> None:
    await connect(app, forge)
    forge.planned.append(Reply(500))
    answer = await app.api.delete("/api/v1/workspaces/repo/connection")
    assert answer.status_code == 200
    assert "answers 500" in answer.json()["hook"]["problem"]
    assert await app.services.connections.all_connections() == []


async def test_after_the_key_was_lost_connecting_again_helps(
    app: Application, forge: FakeForge
) -> None:
    await connect(app, forge)
    await app.database.durable.execute(
        "update connections set secret = overlay(secret placing '\\x00'::bytea from 2)"
    )
    refused = await app.post("/workspaces/repo/rotate-secret", {})
    assert refused.status_code in (200, 400)
    again = await connect(app, forge)
    assert again.status_code == 201, again.text
    assert len(again.json()["hook"]["secret"]) == 64


async def test_a_workspace_of_that_name_is_shown(app: Application, forge: FakeForge) -> None:
    await connect(app, forge)
    assert (await app.api.get("/api/v1/workspaces/connect")).status_code == 404


async def test_the_routes_need_an_api_key(app: Application) -> None:
    assert app.api.headers["Authorization"] == f"Bearer {API_KEY}"
    for method, path in (
        ("POST", "connect"),
        ("POST", "repo/rotate-secret"),
        ("DELETE", "repo/connection"),
    ):
        answer = await app.api.request(
            method, f"/api/v1/workspaces/{path}", headers={"Authorization": ""}
        )
        assert answer.status_code == 401
